"""Candidates weighed on planned passes that they were not made from: two folds, made again in each.

    P planned passes   L layers   C candidates

What a search makes of few passes is partly made of their accidents, the more the harder it looks;
weighed on the same passes it then seems better than a rule that looks at the mean alone. So every
method places for one half of the planned passes and is weighed on the other, in order and the other
way round. The mean of both says which method to take; its placement for all planned passes is it.
A search must be better than the best rule by more than a standard error of their difference.

Only linear programs are weighed so, which follow each pass: elsewhere loads of other passes are
drawn (`starts.drawn_loads`), which takes no second search.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from solvers.placement.dispatch.sampling import PASS_BY_PASS
from solvers.placement.ranks import Floats, Ints, Placement
from solvers.result import Outcome
from tuner.planner.place.candidates import beside_search, policies
from tuner.planner.place.cost import robust
from tuner.planner.place.deadline import spread
from tuner.planner.place.evaluation import judge
from tuner.planner.place.evidence import (
    WorkloadEvidence,
    load_scatter,
    load_variance,
    mean_load_LE,
)
from tuner.spec.place import Objective
from tuner.spec.place_method import Method
from tuner.spec.place_read import PlaceSpec

LEAST_PASSES: Final = 4
"""Planned passes of a workload: two to plan from, two to weigh on."""

MOST_PROGRAMS: Final = 400
"""Of one layer and pass, over all candidates and folds; each takes 10 to 20 ms at 288 slots."""

MOST_PASSES: Final = 1_000_000
"""As good as all."""

Make = Callable[[Sequence[WorkloadEvidence]], Mapping[str, Placement]]
"""Places for some evidence by several methods, by name."""


def unseen_costs(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    solve: Callable[..., Outcome[Placement]],
    dispatch: str,
    *,
    time_limit_s: float,
    passes_s: float = math.inf,
    pass_s: float = 0.0,
) -> dict[str, float]:
    """Return what the methods that a plan chooses among cost on planned passes not seen, by name.

    Empty where it is not asked: it is under a linear program, with the method left open. Empty,
    too, where the time is not enough for a pass of each half.

    Args:
        spec: the question.
        evidence: every workload.
        solve: searches; takes evidence, `goal`, `dispatch` and `time_limit_s`.
        dispatch: the rule.
        time_limit_s: of the searches in both folds.
        passes_s: for the linear programs of both.
        pass_s: what those of one pass take.
    """
    goal, ranks = spec.goal, spec.ranks
    is_open = goal.objective is Objective.BALANCE and goal.method is Method.AUTO
    if dispatch not in PASS_BY_PASS or not is_open or time_limit_s <= 0.0:
        return {}
    most = int(min(passes_s / pass_s, MOST_PASSES)) if pass_s > 0.0 else MOST_PASSES

    def make(fold: Sequence[WorkloadEvidence]) -> dict[str, Placement]:
        outcome = solve(fold, goal=goal, dispatch=dispatch, time_limit_s=0.5 * time_limit_s)
        found = {} if outcome.solution is None else {outcome.method: outcome.solution}
        return found | rules_of(fold)

    def rules_of(fold: Sequence[WorkloadEvidence]) -> dict[str, Placement]:
        by_policy = policies(mean_load_LE(fold), ranks=ranks, groups=goal.expert_groups)
        return by_policy | beside_search(fold, goal=goal, ranks=ranks, dispatch=dispatch)

    cost_P = fold_costs(spec, evidence, make, dispatch=dispatch, most_passes=most)
    return sure_costs(cost_P, tuple(rules_of(evidence))) if cost_P else {}


def fold_costs(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    make: Make,
    *,
    dispatch: str,
    most_passes: int = MOST_PASSES,
) -> dict[str, Floats]:
    """Return each method's imbalance on every pass that it was weighed on; empty: too few passes.

    The robust number of the workloads' passes, one of each in turn. Empty, too, where `most_passes`
    of all placements, workloads and halves are too few for one of each.
    """
    if any(not one.is_split or one.planned_passes < LEAST_PASSES for one in evidence):
        return {}
    found: dict[str, list[float]] = {}
    for later in (False, True):
        fold = [_half(one, later=later) for one in evidence]
        placements = make(fold)
        each = 2 * len(placements) * len(evidence)
        if most_passes < each:
            return {}
        programs = each * fold[0].planned_LE.shape[0]
        fewest = min(len(one.judged_PLE) for one in fold)
        passes = min(max(1, MOST_PROGRAMS // programs), fewest, most_passes // each)
        for name, placement in placements.items():
            cost_WP = np.stack(
                [
                    judge(
                        placement,
                        load_PLE=one.judged_PLE[spread(len(one.judged_PLE), passes)],
                        ranks=spec.ranks,
                        dispatch=dispatch,
                    ).imbalance_P
                    for one in fold
                ]
            )
            costs = [robust(spec, evidence, cost_W) for cost_W in cost_WP.T.tolist()]
            found.setdefault(name, []).extend(costs)
    most = max(len(costs) for costs in found.values())
    return {name: np.array(costs) for name, costs in found.items() if len(costs) == most}


def sure_costs(cost_P: Mapping[str, Floats], rules: Sequence[str]) -> dict[str, float]:
    """Return mean costs, with a standard error on top for what is no rule.

    Of the difference from the best rule, pass by pass: a search has to be better by more than that.
    """
    best = min(rules, key=lambda name: float(cost_P[name].mean()))
    found = {}
    for name, one_P in cost_P.items():
        found[name] = float(one_P.mean())
        if name not in rules and len(one_P) > 1:
            found[name] += float(np.std(one_P - cost_P[best], ddof=1) / np.sqrt(len(one_P)))
    return found


def _half(one: WorkloadEvidence, *, later: bool) -> WorkloadEvidence:
    """Return what is planned from, and judged on, within the planned passes."""
    planned_PLE = one.whole_PLE[: one.planned_passes]
    middle = len(planned_PLE) // 2
    halves = planned_PLE[:middle], planned_PLE[middle:]
    fit_PLE, other_PLE = halves[::-1] if later else halves
    parts = one.part_BLE
    if parts is not None:
        parts = parts[len(parts) // 2 :] if later else parts[: len(parts) // 2]
    fit_counts_PLE = _counts(fit_PLE, one)
    variance_LE = load_variance(
        fit_counts_PLE,
        judged_copies=_counts(other_PLE, one).sum(axis=(0, 2)),
        size=float(fit_PLE.sum(axis=2).mean()),
    )
    return replace(
        one,
        planned_LE=fit_PLE.mean(axis=0),
        judged_PLE=other_PLE,
        part_BLE=parts,
        variance_LE=variance_LE,
        scatter_BLE=load_scatter(fit_counts_PLE, variance_LE=variance_LE),
        whole_PLE=np.concatenate([fit_PLE, other_PLE]),
        planned_passes=len(fit_PLE),
    )


def _counts(load_PLE: Floats, one: WorkloadEvidence) -> Ints:
    """Return the token copies that were recorded, of loads stated for another size of pass."""
    return np.asarray(np.rint(load_PLE * one.recorded_ratio).astype(np.int64))
