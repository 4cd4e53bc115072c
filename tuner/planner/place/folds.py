"""Candidates weighed on planned passes that they were not made from: two folds, made again in each.

    P planned passes   L layers   C candidates

What a search makes of few passes is partly made of their accidents, the more the harder it looks;
weighed on the same passes it then seems better than a rule that looks at the mean alone. So every
method places for one half of the planned passes and is weighed on the other, in order and the other
way round. The mean of both says which method to take; its placement for all planned passes is it.

Only linear programs are weighed so, which follow each pass: elsewhere loads of other passes are
drawn (`starts.drawn_loads`), which takes no second search.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from solvers.placement.dispatch.sampling import PASS_BY_PASS
from solvers.placement.ranks import Placement
from solvers.result import Outcome
from tuner.planner.place.candidates import beside_search, policies
from tuner.planner.place.costing import robust
from tuner.planner.place.evidence import WorkloadEvidence, mean_load_LE
from tuner.planner.place.judging import judge
from tuner.spec.place import Objective
from tuner.spec.place_method import Method
from tuner.spec.place_read import PlaceSpec

LEAST_PASSES: Final = 4
"""Planned passes of a workload: two to plan from, two to weigh on."""

MOST_PROGRAMS: Final = 400
"""Of one layer and pass, over all candidates and folds; each takes 10 to 20 ms at 288 slots."""

Make = Callable[[Sequence[WorkloadEvidence]], Mapping[str, Placement]]
"""Places for some evidence by several methods, by name."""


def unseen_costs(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    solve: Callable[..., Outcome[Placement]],
    dispatch: str,
    *,
    time_limit_s: float,
) -> dict[str, float]:
    """Return what the methods that a plan chooses among cost on planned passes not seen, by name.

    Empty where it is not asked: it is under a linear program, with the method left open.

    Args:
        spec: the question.
        evidence: every workload.
        solve: searches; takes evidence, `goal`, `dispatch` and `time_limit_s`.
        dispatch: the rule.
        time_limit_s: of the searches in both folds.
    """
    goal, ranks = spec.goal, spec.ranks
    is_open = goal.objective is Objective.BALANCE and goal.method is Method.AUTO
    if dispatch not in PASS_BY_PASS or not is_open:
        return {}

    def make(fold: Sequence[WorkloadEvidence]) -> dict[str, Placement]:
        outcome = solve(fold, goal=goal, dispatch=dispatch, time_limit_s=0.5 * time_limit_s)
        found = {} if outcome.solution is None else {outcome.method: outcome.solution}
        found |= policies(mean_load_LE(fold), ranks=ranks, groups=goal.expert_groups)
        return found | beside_search(fold, goal=goal, ranks=ranks, dispatch=dispatch)

    return fold_costs(spec, evidence, make, dispatch=dispatch)


def fold_costs(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], make: Make, *, dispatch: str
) -> dict[str, float]:
    """Return each method's imbalance on passes that it did not see; empty where passes are few."""
    if any(not one.is_split or one.planned_passes < LEAST_PASSES for one in evidence):
        return {}
    found: dict[str, list[float]] = {}
    for later in (False, True):
        fold = [_half(one, later=later) for one in evidence]
        placements = make(fold)
        programs = 2 * len(placements) * len(evidence) * fold[0].planned_LE.shape[0]
        most = max(1, MOST_PROGRAMS // programs)
        for name, placement in placements.items():
            values = [
                judge(
                    placement,
                    load_PLE=one.judged_PLE[_spread(len(one.judged_PLE), most)],
                    ranks=spec.ranks,
                    dispatch=dispatch,
                ).imbalance
                for one in fold
            ]
            found.setdefault(name, []).append(robust(spec, evidence, values))
    return {name: float(np.mean(values)) for name, values in found.items() if len(values) == 2}


def _spread(passes: int, most: int) -> list[int]:
    return sorted(set(np.linspace(0, passes - 1, most).round().astype(int).tolist()))


def _half(one: WorkloadEvidence, *, later: bool) -> WorkloadEvidence:
    """Return what is planned from, and judged on, within the planned passes."""
    planned_PLE = one.whole_PLE[: one.planned_passes]
    middle = len(planned_PLE) // 2
    halves = planned_PLE[:middle], planned_PLE[middle:]
    fit_PLE, other_PLE = halves[::-1] if later else halves
    parts = one.part_BLE
    if parts is not None:
        parts = parts[len(parts) // 2 :] if later else parts[: len(parts) // 2]
    return replace(
        one,
        planned_LE=fit_PLE.mean(axis=0),
        judged_PLE=other_PLE,
        part_BLE=parts,
        variance_LE=2.0 * one.variance_LE,
        whole_PLE=np.concatenate([fit_PLE, other_PLE]),
        planned_passes=len(fit_PLE),
    )
