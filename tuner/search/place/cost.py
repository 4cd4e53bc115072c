"""The objective of a placement on the fit passes."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from solvers.placement.balance.check import LAUNCH_SEED, launch_times, objective
from solvers.placement.balance.objective import robust_slope, value_of
from solvers.placement.balance.starts import drawn_times
from solvers.placement.ranks import Floats, Placement, Ranks
from tuner.costs.place.expert_layer import LayerSeconds
from tuner.search.place.candidates import balance_problem
from tuner.search.place.evaluation import evaluate, evaluate_loads
from tuner.search.place.evidence import WorkloadEvidence
from tuner.search.place.passes import fit_imbalances, is_per_pass, scoring_passes
from tuner.search.place.prices import Pricing
from tuner.spec.place import Dispatch, Objective, PlaceGoal
from tuner.spec.place_read import PlaceSpec

CHOICE_SEED: Final = 4_711
"""Seed of the static-dispatch launches that candidates are ordered by. The certificate uses other
launches, so that the winner is not certified on the draws it was selected by."""

CHOICE_DRAWS: Final = 32
"""Draws of launches and loads."""


def fit_cost(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    pricing: Pricing | None,
    dispatch: str,
    *,
    seed: int = LAUNCH_SEED,
) -> float:
    """Return the objective on the fit passes.

    Args:
        spec: what to plan.
        evidence: every workload.
        placement: to be scored.
        pricing: of time; None: loads count.
        dispatch: the dispatch rule.
        seed: of launches, where dispatch is random.
    """
    if spec.goal.objective is not Objective.LAYER_TIME or pricing is None:
        if is_per_pass(dispatch):
            return robust(
                spec,
                evidence,
                fit_imbalances(evidence, placement, ranks=spec.ranks, dispatch=dispatch),
            )
        problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks, dispatch=dispatch)
        return objective(problem, placement, seed=seed)
    layers_WL = fit_layers_WL(spec, evidence, placement, pricing, dispatch, seed=seed)
    return robust(spec, evidence, layers_WL.sum(axis=1).tolist())


def ordering_cost(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    cost: float,
    dispatch: str,
    pricing: Pricing | None,
) -> float:
    """Return what candidates are ordered by: the cost, or its mean over drawn loads or launches.

    Where near replicas come first, the search uses drawn loads
    (`starts.py`). The launches differ from those of the cost, and the loads from those of the
    search.
    """
    if spec.goal.objective is Objective.LAYER_TIME and dispatch == Dispatch.STATIC.value:
        return fit_cost(spec, evidence, placement, pricing, dispatch, seed=CHOICE_SEED)
    if spec.goal.objective is not Objective.BALANCE or is_per_pass(dispatch):
        return cost
    problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks, dispatch=dispatch)
    if not problem.dispatch.is_near:
        return cost
    time_WL = drawn_times(problem, placement, seed=CHOICE_SEED, draws=CHOICE_DRAWS)
    return value_of(problem, time_WL)


def active_load_of(goal: PlaceGoal, pricing: Pricing | None) -> float:
    """Return the cost of reading an expert's weights in token copies; 0 where only copies count."""
    if pricing is None or goal.objective is not Objective.LAYER_TIME:
        return 0.0
    return pricing.active_load


def fit_layers_WL(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    pricing: Pricing,
    dispatch: str,
    *,
    seed: int = LAUNCH_SEED,
) -> Floats:
    """Return the seconds of every layer on the fit passes.

    Under static dispatch, their mean over launches, as the imbalance is (`check.py` of balance).
    """
    priced = fit_seconds(spec, evidence, placement, pricing, dispatch, seed=seed)
    return np.stack([one.layer_L for one in priced])


def fit_seconds(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    pricing: Pricing,
    dispatch: str,
    *,
    seed: int = LAUNCH_SEED,
) -> list[LayerSeconds]:
    """Return each workload's seconds on the fit passes; one pass per launch under static."""
    seconds = []
    for one in evidence:
        load_PLE = scoring_passes(one, dispatch)
        if dispatch == Dispatch.STATIC.value:
            problem = balance_problem([one], goal=spec.goal, ranks=spec.ranks, dispatch=dispatch)
            time_DLG = launch_times(problem, placement, seed=seed)[:, 0]
            evaluation = evaluate_loads(time_DLG * spec.ranks.speed_G, ranks=spec.ranks)
            load_PLE = np.repeat(load_PLE, len(time_DLG), axis=0)
        else:
            evaluation = evaluate(placement, load_PLE=load_PLE, ranks=spec.ranks, dispatch=dispatch)
        priced = pricing.price(
            placement, evaluation, load_PLE=load_PLE, ranks=spec.ranks, token_LTK=one.fit_LTK
        )
        seconds.append(priced)
    return seconds


def seconds_error(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    priced: Sequence[LayerSeconds],
    dispatch: str,
) -> float:
    """Jackknife standard error of the seconds, a mean over drawn launches."""
    if dispatch != Dispatch.STATIC.value:
        return 0.0
    pass_WD = np.stack([one.pass_P for one in priced])
    launches = pass_WD.shape[1]
    if launches < 2:
        return 0.0
    without_WD = (pass_WD.sum(axis=1, keepdims=True) - pass_WD) / (launches - 1)
    values = [robust(spec, evidence, without_W) for without_W in without_WD.T.tolist()]
    return math.sqrt((launches - 1) * float(np.var(values)))


def fit_bound_WL(
    evidence: Sequence[WorkloadEvidence], pricing: Pricing, ranks: Ranks, dispatch: str
) -> Floats:
    """Return a lower bound on the seconds of every layer, for any placement on the same passes."""
    bounds = []
    for one in evidence:
        load_PLE = scoring_passes(one, dispatch)
        passes, layers, experts = load_PLE.shape
        bound_X = pricing.bound_L(load_LE=load_PLE.reshape(-1, experts), ranks=ranks)
        bounds.append(bound_X.reshape(passes, layers).mean(axis=0))
    return np.stack(bounds)


def robust(spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], values: Sequence[float]) -> float:
    """Combine the workloads' values as the goal says."""
    return float(np.dot(robust_weights(spec, evidence, values), values))


def robust_weights(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], values: Sequence[float]
) -> Floats:
    """Return the weight of each workload at these values; sums to 1."""
    # The weights depend on the values alone.
    problem = balance_problem(
        evidence, goal=spec.goal, ranks=spec.ranks, dispatch=Dispatch.EVEN.value
    )
    return robust_slope(problem, np.asarray(values, dtype=np.float64))
