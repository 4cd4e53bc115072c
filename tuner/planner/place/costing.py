"""What a placement costs on the passes that are planned from, in the words of the goal."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from solvers.placement.balance.check import objective
from solvers.placement.balance.objective import robust_slope
from solvers.placement.ranks import Floats, Placement
from tuner.planner.place.candidates import balance_problem
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.judging import judge
from tuner.planner.place.pricing import Pricing
from tuner.spec.place import Dispatch, Objective, PlaceGoal
from tuner.spec.place_dispatch import UNLAUNCHED
from tuner.spec.place_read import PlaceSpec

DRAWN_PASSES: Final = 32
"""Of a rule that goes by which experts are read."""


def planned_cost(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    pricing: Pricing | None,
    dispatch: str,
) -> float:
    """Return the objective on the passes that are planned from."""
    if spec.goal.objective is not Objective.LAYER_TIME or pricing is None:
        if spec.goal.dispatch is Dispatch.LEAST_LOADED:
            return robust(spec, evidence, planned_imbalances(spec, evidence, placement))
        problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks)
        return objective(problem, placement)
    layers_WL = planned_layers_WL(spec, evidence, placement, pricing, dispatch)
    return robust(spec, evidence, layers_WL.sum(axis=1).tolist())


def active_load_of(goal: PlaceGoal, pricing: Pricing | None) -> float:
    """Return what reading an expert's weights counts in token copies, 0 where copies alone do."""
    if pricing is None or goal.objective is not Objective.LAYER_TIME:
        return 0.0
    return pricing.active_load


def planned_imbalances(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], placement: Placement
) -> list[float]:
    """Return the imbalance of each workload's mean pass under a rule that no engine has."""
    rule = certified_rule(spec.goal)
    return [
        judge(placement, load_PLE=one.planned_LE[None], ranks=spec.ranks, dispatch=rule).imbalance
        for one in evidence
    ]


def certified_rule(goal: PlaceGoal) -> str:
    """Return the dispatch rule that the certificate is about: even, unless no engine has it."""
    return goal.dispatch.value if goal.dispatch in UNLAUNCHED else Dispatch.EVEN.value


def planned_layers_WL(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    pricing: Pricing,
    dispatch: str,
) -> Floats:
    """Return the seconds of every layer on the mean pass that is planned from.

    Which experts a pass reads is drawn where the rule goes by it.
    """
    seconds = []
    for one in evidence:
        load_PLE = one.planned_LE[None]
        if dispatch == Dispatch.ACTIVATED.value:
            load_PLE = drawn_passes(one.planned_LE)
        judged = judge(placement, load_PLE=load_PLE, ranks=spec.ranks, dispatch=dispatch)
        priced = pricing.price(
            placement, judged, load_PLE=load_PLE, ranks=spec.ranks, token_LTK=one.planned_LTK
        )
        seconds.append(priced.layer_L)
    return np.stack(seconds)


def drawn_passes(load_LE: Floats) -> Floats:
    """Return passes of whole token copies whose mean these loads are, Poisson arrivals."""
    return np.random.default_rng(0).poisson(load_LE, (DRAWN_PASSES, *load_LE.shape)).astype(float)


def robust(spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], values: Sequence[float]) -> float:
    """Make one number of the workloads' as the goal says."""
    return float(np.dot(robust_weights(spec, evidence, values), values))


def robust_weights(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], values: Sequence[float]
) -> Floats:
    """Return how much each workload counts at these values; sums to 1."""
    problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks)
    return robust_slope(problem, np.asarray(values, dtype=np.float64))
