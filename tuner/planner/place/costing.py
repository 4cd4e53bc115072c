"""What a placement costs on the passes that are planned from, in the words of the goal."""

from collections.abc import Sequence

from solvers.placement.balance.check import objective
from solvers.placement.ranks import Placement
from tuner.planner.place.candidates import balance_problem
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.judging import judge
from tuner.planner.place.pricing import Pricing
from tuner.spec.place import Objective, Robustness
from tuner.spec.place_read import PlaceSpec


def planned_cost(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    pricing: Pricing | None,
    dispatch: str,
) -> float:
    """Return the objective on the passes that are planned from."""
    if spec.goal.objective is not Objective.LAYER_TIME or pricing is None:
        problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks)
        return objective(problem, placement)
    values = []
    for one in evidence:
        load_PLE = one.planned_LE[None]
        judged = judge(placement, load_PLE=load_PLE, ranks=spec.ranks, dispatch=dispatch)
        seconds = pricing.price(
            placement, judged, load_PLE=load_PLE, ranks=spec.ranks, recording=one.recording
        )
        values.append(float(seconds.pass_P.mean()))
    return robust(spec, evidence, values)


def robust(spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], values: Sequence[float]) -> float:
    """Make one number of the workloads' as the goal says."""
    if spec.goal.robust is Robustness.WORST:
        return max(values)
    tail = 1.0 if spec.goal.robust is Robustness.MEAN else spec.goal.tail_ratio
    left, total = tail, 0.0
    for value, weight in sorted(
        zip(values, (one.weight_ratio for one in evidence), strict=True), reverse=True
    ):
        taken = min(weight, left)
        total += taken * value
        left -= taken
    return total / tail
