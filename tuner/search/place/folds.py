"""Two-fold cross-validation of placement methods on the fit passes.

    P fit passes   L layers   C candidates

A search on few passes overfits them, and scored on the same passes looks better than a policy that
uses the mean alone. So every method places for one half of the fit passes and is scored on the
other half, and vice versa. The method with the better mean is taken, with its placement for all fit
passes. A search must beat the best EPLB policy by more than a standard error of their difference.

Only linear programs, which act pass by pass, are scored this way. Elsewhere loads of other passes
are drawn (`starts.drawn_loads`), which takes no second search.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from solvers.placement.dispatch.sampling import PASS_BY_PASS
from solvers.placement.ranks import Floats, Ints, Placement
from solvers.result import Outcome
from tuner.search.place.candidates import node_local_replicas, policies
from tuner.search.place.cost import robust
from tuner.search.place.deadline import spread
from tuner.search.place.evaluation import evaluate
from tuner.search.place.evidence import (
    WorkloadEvidence,
    load_scatter,
    load_variance,
    mean_load_LE,
)
from tuner.spec.place import Objective
from tuner.spec.place_method import Method
from tuner.spec.place_read import PlaceSpec

LEAST_PASSES: Final = 4
"""Fit passes of a workload: two to solve on, two to score on."""

MOST_PROGRAMS: Final = 400
"""Linear programs (one per layer and pass) over all candidates and folds; each takes 10 to 20 ms at
288 slots."""

MOST_PASSES: Final = 1_000_000
"""No limit."""

PlaceFold = Callable[[Sequence[WorkloadEvidence]], Mapping[str, Placement]]
"""Places for one fold by several methods; by name."""


def two_fold_costs(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    solve: Callable[..., Outcome[Placement]],
    dispatch: str,
    *,
    time_limit_s: float,
    passes_s: float = math.inf,
    pass_s: float = 0.0,
) -> dict[str, float]:
    """Return the two-fold cost of each method that a plan chooses among, by name.

    Empty unless dispatch is a linear program and the method is open, and where the time does not
    suffice for one pass of each half.

    Args:
        spec: what to plan.
        evidence: every workload.
        solve: takes evidence, `goal`, `dispatch` and `time_limit_s`.
        dispatch: the dispatch rule.
        time_limit_s: of the searches in both folds.
        passes_s: of the linear programs in both folds.
        pass_s: seconds of the linear programs of one pass.
    """
    goal, ranks = spec.goal, spec.ranks
    is_open = goal.objective is Objective.BALANCE and goal.method is Method.AUTO
    if dispatch not in PASS_BY_PASS or not is_open or time_limit_s <= 0.0:
        return {}
    most = int(min(passes_s / pass_s, MOST_PASSES)) if pass_s > 0.0 else MOST_PASSES

    def make(fold: Sequence[WorkloadEvidence]) -> dict[str, Placement]:
        outcome = solve(fold, goal=goal, dispatch=dispatch, time_limit_s=0.5 * time_limit_s)
        by_method = {} if outcome.solution is None else {outcome.method: outcome.solution}
        return by_method | baselines(fold)

    def baselines(fold: Sequence[WorkloadEvidence]) -> dict[str, Placement]:
        by_policy = policies(mean_load_LE(fold), ranks=ranks, groups=goal.expert_groups)
        return by_policy | node_local_replicas(fold, goal=goal, ranks=ranks, dispatch=dispatch)

    cost_P = fold_costs(spec, evidence, make, dispatch=dispatch, most_passes=most)
    return penalised_costs(cost_P, tuple(baselines(evidence))) if cost_P else {}


def fold_costs(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    make: PlaceFold,
    *,
    dispatch: str,
    most_passes: int = MOST_PASSES,
) -> dict[str, Floats]:
    """Return each method's imbalance on every pass it was scored on; empty: too few passes.

    Workloads are combined as the goal says, one pass of each at a time. Empty, too, where
    `most_passes` does not suffice for one pass of each placement, workload and half.
    """
    if any(not one.is_split or one.num_fit_passes < LEAST_PASSES for one in evidence):
        return {}
    costs_by_method: dict[str, list[float]] = {}
    for later in (False, True):
        fold = [_half(one, later=later) for one in evidence]
        placements = make(fold)
        each = 2 * len(placements) * len(evidence)
        if most_passes < each:
            return {}
        programs = each * fold[0].fit_LE.shape[0]
        fewest = min(len(one.holdout_PLE) for one in fold)
        passes = min(max(1, MOST_PROGRAMS // programs), fewest, most_passes // each)
        for name, placement in placements.items():
            cost_WP = np.stack(
                [
                    evaluate(
                        placement,
                        load_PLE=one.holdout_PLE[spread(len(one.holdout_PLE), passes)],
                        ranks=spec.ranks,
                        dispatch=dispatch,
                    ).imbalance_P
                    for one in fold
                ]
            )
            costs = [robust(spec, evidence, cost_W) for cost_W in cost_WP.T.tolist()]
            costs_by_method.setdefault(name, []).extend(costs)
    most = max(len(costs) for costs in costs_by_method.values())
    return {name: np.array(costs) for name, costs in costs_by_method.items() if len(costs) == most}


def penalised_costs(cost_P: Mapping[str, Floats], policies: Sequence[str]) -> dict[str, float]:
    """Return mean costs; methods that are no EPLB policy are penalised by a standard error.

    It is that of the paired difference from the best policy: a search has to win by more.
    """
    best = min(policies, key=lambda name: float(cost_P[name].mean()))
    penalised = {}
    for name, one_P in cost_P.items():
        penalised[name] = float(one_P.mean())
        if name not in policies and len(one_P) > 1:
            penalised[name] += float(np.std(one_P - cost_P[best], ddof=1) / np.sqrt(len(one_P)))
    return penalised


def _half(one: WorkloadEvidence, *, later: bool) -> WorkloadEvidence:
    """Return a fold: half of the fit passes to fit on, the other half held out."""
    fit_PLE = one.whole_PLE[: one.num_fit_passes]
    middle = len(fit_PLE) // 2
    halves = fit_PLE[:middle], fit_PLE[middle:]
    half_fit_PLE, half_holdout_PLE = halves[::-1] if later else halves
    parts = one.part_BLE
    if parts is not None:
        parts = parts[len(parts) // 2 :] if later else parts[: len(parts) // 2]
    half_counts_PLE = _counts(half_fit_PLE, one)
    variance_LE = load_variance(
        half_counts_PLE,
        holdout_copies=_counts(half_holdout_PLE, one).sum(axis=(0, 2)),
        size=float(half_fit_PLE.sum(axis=2).mean()),
    )
    return replace(
        one,
        fit_LE=half_fit_PLE.mean(axis=0),
        holdout_PLE=half_holdout_PLE,
        part_BLE=parts,
        variance_LE=variance_LE,
        scatter_BLE=load_scatter(half_counts_PLE, variance_LE=variance_LE),
        whole_PLE=np.concatenate([half_fit_PLE, half_holdout_PLE]),
        num_fit_passes=len(half_fit_PLE),
    )


def _counts(load_PLE: Floats, one: WorkloadEvidence) -> Ints:
    """Return recorded token copies, given loads scaled to another size of pass."""
    return np.asarray(np.rint(load_PLE * one.recorded_ratio).astype(np.int64))
