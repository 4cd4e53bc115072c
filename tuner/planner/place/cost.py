"""What a placement costs on the passes that are planned from, in the words of the goal."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from solvers.placement.balance.check import LAUNCH_SEED, launch_times, objective
from solvers.placement.balance.objective import robust_slope, value_of
from solvers.placement.balance.starts import drawn_times, with_parts
from solvers.placement.ranks import Floats, Placement, Ranks
from tuner.costs.expert_layer import LayerSeconds
from tuner.planner.place.candidates import balance_problem
from tuner.planner.place.evaluation import arrivals, judge, judged_of
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.known_table import weighed_as
from tuner.planner.place.passes import planned_passes, weighs_passes
from tuner.planner.place.prices import Pricing
from tuner.spec.place import Dispatch, Objective, PlaceGoal
from tuner.spec.place_read import PlaceSpec

CHOICE_SEED: Final = 4_711
"""Of the launches of static dispatch that candidates are ordered by; others certify the chosen one,
so that it is not certified by the launches that it happened to do well in."""

CHOICE_DRAWS: Final = 32
"""Of launches and loads."""


def planned_cost(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    pricing: Pricing | None,
    dispatch: str,
    *,
    seed: int = LAUNCH_SEED,
) -> float:
    """Return the objective on the passes that are planned from.

    Args:
        spec: the question.
        evidence: every workload.
        placement: to be weighed.
        pricing: where time is priced.
        dispatch: the rule.
        seed: of launches, where dispatch is random; another one to choose a placement by.
    """
    if spec.goal.objective is not Objective.LAYER_TIME or pricing is None:
        if weighs_passes(dispatch):
            return robust(spec, evidence, planned_imbalances(spec, evidence, placement, dispatch))
        problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks, dispatch=dispatch)
        return objective(*weighed_as(spec, problem, placement, dispatch), seed=seed)
    layers_WL = planned_layers_WL(spec, evidence, placement, pricing, dispatch, seed=seed)
    return robust(spec, evidence, layers_WL.sum(axis=1).tolist())


def parts_cost(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    cost: float,
    dispatch: str,
    pricing: Pricing | None,
) -> float:
    """Return what candidates are ordered by: the cost, or its mean over what other passes may have.

    Where near replicas come first, the search looks at parts that differ, or at loads that scatter
    (`starts.py`). Launches are others than those of the cost, and loads than those of the search.
    """
    if spec.goal.objective is Objective.LAYER_TIME and dispatch == Dispatch.STATIC.value:
        return planned_cost(spec, evidence, placement, pricing, dispatch, seed=CHOICE_SEED)
    if spec.goal.objective is not Objective.BALANCE or weighs_passes(dispatch):
        return cost
    problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks, dispatch=dispatch)
    if not problem.dispatch.is_near:
        return cost
    problem, placement = weighed_as(spec, problem, placement, dispatch)
    parted = with_parts(problem)
    time_WL = drawn_times(parted, placement, seed=CHOICE_SEED, draws=CHOICE_DRAWS)
    return value_of(parted, time_WL)


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


def planned_layers_WL(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    pricing: Pricing,
    dispatch: str,
    *,
    seed: int = LAUNCH_SEED,
) -> Floats:
    """Return the seconds of every layer on the passes that are planned from.

    Under static dispatch, their mean over launches, as the imbalance is (`check.py` of balance).
    """
    priced = planned_seconds(spec, evidence, placement, pricing, dispatch, seed=seed)
    return np.stack([one.layer_L for one in priced])


def planned_seconds(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    pricing: Pricing,
    dispatch: str,
    *,
    seed: int = LAUNCH_SEED,
) -> list[LayerSeconds]:
    """Return each workload's seconds of the passes planned from; a pass a launch under static."""
    seconds = []
    for one in evidence:
        load_PLE = planned_passes(one, dispatch)
        if dispatch == Dispatch.STATIC.value:
            problem = balance_problem([one], goal=spec.goal, ranks=spec.ranks, dispatch=dispatch)
            time_DLG = launch_times(problem, placement, seed=seed)[:, 0]
            judged = judged_of(time_DLG * spec.ranks.speed_G, ranks=spec.ranks)
            load_PLE = np.repeat(load_PLE, len(time_DLG), axis=0)
        else:
            judged = judge(placement, load_PLE=load_PLE, ranks=spec.ranks, dispatch=dispatch)
        priced = pricing.price(
            placement, judged, load_PLE=load_PLE, ranks=spec.ranks, token_LTK=one.planned_LTK
        )
        seconds.append(priced)
    return seconds


def seconds_error(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    priced: Sequence[LayerSeconds],
    dispatch: str,
) -> float:
    """Of the planned seconds as a mean over drawn launches, each left out in turn (jackknife)."""
    if dispatch != Dispatch.STATIC.value:
        return 0.0
    pass_WD = np.stack([one.pass_P for one in priced])
    launches = pass_WD.shape[1]
    if launches < 2:
        return 0.0
    without_WD = (pass_WD.sum(axis=1, keepdims=True) - pass_WD) / (launches - 1)
    values = [robust(spec, evidence, without_W) for without_W in without_WD.T.tolist()]
    return math.sqrt((launches - 1) * float(np.var(values)))


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
