"""What a placement costs on the passes that are planned from, in the words of the goal."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from solvers.placement.balance.check import objective
from solvers.placement.balance.objective import robust_slope
from solvers.placement.balance.problem import Dispatch as Solved
from solvers.placement.balance.starts import with_parts
from solvers.placement.dispatch.sampling import PASS_BY_PASS
from solvers.placement.ranks import Floats, Placement, Ranks
from tuner.planner.place.candidates import balance_problem
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.judging import arrivals, judge
from tuner.planner.place.pricing import Pricing
from tuner.spec.place import Dispatch, Objective, PlaceGoal
from tuner.spec.place_dispatch import UNLAUNCHED
from tuner.spec.place_read import PlaceSpec

CHOICE_SEED: Final = 4_711
"""Of the launches of static dispatch that candidates are ordered by; others certify the chosen one,
so that it is not certified by the launches that it happened to do well in."""

MOST_PASSES: Final = 32
"""Weighed under a rule that looks at each pass by itself."""

MOST_SOLVED_PASSES: Final = 8
"""Weighed where each takes a linear program for every layer."""


def planned_cost(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    pricing: Pricing | None,
    dispatch: str,
) -> float:
    """Return the objective on the passes that are planned from."""
    if spec.goal.objective is not Objective.LAYER_TIME or pricing is None:
        if weighs_passes(dispatch):
            return robust(spec, evidence, planned_imbalances(spec, evidence, placement, dispatch))
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
    if spec.goal.objective is not Objective.BALANCE or weighs_passes(dispatch):
        return cost
    problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks, dispatch=dispatch)
    if not problem.dispatch.is_near:
        return cost
    parted = with_parts(problem)
    if problem.dispatch is Solved.STATIC:
        return objective(parted, placement, seed=CHOICE_SEED)
    is_same = parted.num_workloads == problem.num_workloads
    return cost if is_same else objective(parted, placement)


def active_load_of(goal: PlaceGoal, pricing: Pricing | None) -> float:
    """Return what reading an expert's weights counts in token copies, 0 where copies alone do."""
    if pricing is None or goal.objective is not Objective.LAYER_TIME:
        return 0.0
    return pricing.active_load


def planned_imbalances(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    dispatch: str,
) -> list[float]:
    """Return each workload's imbalance under a rule that looks at each pass by itself."""
    return [
        judge(
            placement, load_PLE=planned_passes(one, dispatch), ranks=spec.ranks, dispatch=dispatch
        ).imbalance
        for one in evidence
    ]


def weighs_passes(dispatch: str) -> bool:
    """Whether a rule looks at each pass by itself, so that the mean pass does not stand for it."""
    return dispatch in PASS_BY_PASS or dispatch in {rule.value for rule in UNLAUNCHED}


def planned_layers_WL(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    pricing: Pricing,
    dispatch: str,
) -> Floats:
    """Return the seconds of every layer on the passes that are planned from."""
    seconds = []
    for one in evidence:
        load_PLE = planned_passes(one, dispatch)
        judged = judge(placement, load_PLE=load_PLE, ranks=spec.ranks, dispatch=dispatch)
        priced = pricing.price(
            placement, judged, load_PLE=load_PLE, ranks=spec.ranks, token_LTK=one.planned_LTK
        )
        seconds.append(priced.layer_L)
    return np.stack(seconds)


def planned_bound_WL(
    evidence: Sequence[WorkloadEvidence], pricing: Pricing, ranks: Ranks, dispatch: str
) -> Floats:
    """Return seconds of every layer that no placement goes below on the same passes."""
    bounds = []
    for one in evidence:
        load_PLE = planned_passes(one, dispatch)
        if dispatch == Dispatch.ACTIVATED.value:
            load_PLE = arrivals(load_PLE)
        passes, layers, experts = load_PLE.shape
        bound_X = pricing.bound_L(load_LE=load_PLE.reshape(-1, experts), ranks=ranks)
        bounds.append(bound_X.reshape(passes, layers).mean(axis=0))
    return np.stack(bounds)


def planned_passes(one: WorkloadEvidence, dispatch: str) -> Floats:
    """Return what a rule is weighed on: the mean pass, or passes where it differs from one to next.

    Rules that look at each pass by itself, at which experts it reads, whether it is uneven or how
    its counts are split best, are weighed on recorded passes, or on draws from the mean where one
    pass was recorded.
    """
    if not weighs_passes(dispatch):
        return one.planned_LE[None]
    planned_PLE = one.whole_PLE[: one.planned_passes] if one.is_split else one.planned_LE[None]
    most = MOST_SOLVED_PASSES if dispatch in PASS_BY_PASS else MOST_PASSES
    taken = np.linspace(0, len(planned_PLE) - 1, most).round().astype(np.int64)
    is_drawn = dispatch == Dispatch.ACTIVATED.value and not one.is_counted
    return planned_PLE[taken if is_drawn else np.unique(taken)]


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
