"""What a placement costs on the passes that are planned from, in the words of the goal."""

from collections.abc import Sequence

import numpy as np

from solvers.placement.balance.check import objective
from solvers.placement.balance.objective import robust_slope
from solvers.placement.balance.problem import Dispatch
from solvers.placement.balance.starts import with_parts
from solvers.placement.ranks import Floats, Placement
from tuner.planner.place.candidates import balance_problem
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.judging import judge
from tuner.planner.place.pricing import Pricing
from tuner.spec.place import Objective, PlaceGoal
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
        problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks, dispatch=dispatch)
        return objective(problem, placement)
    layers_WL = planned_layers_WL(spec, evidence, placement, pricing, dispatch)
    return robust(spec, evidence, layers_WL.sum(axis=1).tolist())


def parts_cost(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    cost: float,
    dispatch: str,
) -> float:
    """Return what candidates are ordered by: the cost, or its mean over parts of the recording.

    Where near replicas come first, the search looks at parts that differ (`starts.py`).
    """
    problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks, dispatch=dispatch)
    if spec.goal.objective is not Objective.BALANCE or not problem.dispatch.is_near:
        return cost
    parted = with_parts(problem)
    is_same = parted.num_workloads == problem.num_workloads
    return cost if is_same else objective(parted, placement)


def active_load_of(goal: PlaceGoal, pricing: Pricing | None) -> float:
    """Return what reading an expert's weights counts in token copies, 0 where copies alone do."""
    if pricing is None or goal.objective is not Objective.LAYER_TIME:
        return 0.0
    return pricing.active_load


def planned_layers_WL(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    pricing: Pricing,
    dispatch: str,
) -> Floats:
    """Return the seconds of every layer on the mean pass that is planned from."""
    seconds = []
    for one in evidence:
        load_PLE = one.planned_LE[None]
        judged = judge(placement, load_PLE=load_PLE, ranks=spec.ranks, dispatch=dispatch)
        priced = pricing.price(
            placement, judged, load_PLE=load_PLE, ranks=spec.ranks, token_LTK=one.planned_LTK
        )
        seconds.append(priced.layer_L)
    return np.stack(seconds)


def robust(spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], values: Sequence[float]) -> float:
    """Make one number of the workloads' as the goal says."""
    return float(np.dot(robust_weights(spec, evidence, values), values))


def robust_weights(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], values: Sequence[float]
) -> Floats:
    """Return how much each workload counts at these values; sums to 1."""
    # How much a workload counts depends on the values alone.
    problem = balance_problem(
        evidence, goal=spec.goal, ranks=spec.ranks, dispatch=Dispatch.EVEN.value
    )
    return robust_slope(problem, np.asarray(values, dtype=np.float64))
