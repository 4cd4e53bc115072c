"""The objective of a placement on the fit passes."""

from collections.abc import Sequence

import numpy as np

from solvers.placement.balance.check import CHOICE_SEED, LAUNCH_SEED, launch_times, objective
from solvers.placement.balance.objective import robust_slope
from solvers.placement.ranks import Floats, Placement, Ranks
from tuner.costs.place.expert_layer import LayerSeconds
from tuner.search.place.candidates import balance_problem
from tuner.search.place.evaluation import evaluate, evaluate_loads
from tuner.search.place.evidence import WorkloadEvidence
from tuner.search.place.passes import fit_imbalances, is_per_pass, scoring_passes
from tuner.search.place.prices import Pricing
from tuner.spec.place import Dispatch, Objective, PlaceGoal
from tuner.spec.place_read import PlaceSpec


def fit_cost(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    pricing: Pricing | None,
    dispatch: str,
) -> float:
    """Return the objective on the fit passes, to choose by: not over the certificate's launches.

    Args:
        spec: what to plan.
        evidence: every workload.
        placement: to be scored.
        pricing: of time; None: loads count.
        dispatch: the dispatch rule.
    """
    if spec.goal.objective is not Objective.LAYER_TIME or pricing is None:
        if is_per_pass(dispatch):
            return robust(
                spec,
                evidence,
                fit_imbalances(evidence, placement, ranks=spec.ranks, dispatch=dispatch),
            )
        problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks, dispatch=dispatch)
        return objective(problem, placement, seed=CHOICE_SEED)
    priced = fit_seconds(spec, evidence, placement, pricing, dispatch, seed=CHOICE_SEED)
    return robust(spec, evidence, [float(one.layer_L.sum()) for one in priced])


def active_load_of(goal: PlaceGoal, pricing: Pricing | None) -> float:
    """Return the cost of reading an expert's weights in token copies; 0 where only copies count."""
    if pricing is None or goal.objective is not Objective.LAYER_TIME:
        return 0.0
    return pricing.active_load


def fit_seconds(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    pricing: Pricing,
    dispatch: str,
    *,
    seed: int = LAUNCH_SEED,
) -> list[LayerSeconds]:
    """Return each workload's seconds on the fit passes; one pass per launch under static.

    `seed` is that of the launches, which are the certificate's by default.
    """
    seconds = []
    for one in evidence:
        load_PLE = scoring_passes(one, dispatch)
        if dispatch == Dispatch.STATIC.value:
            problem = balance_problem([one], goal=spec.goal, ranks=spec.ranks, dispatch=dispatch)
            time_DLG = launch_times(problem, placement, seed=seed)[:, 0]
            evaluation = evaluate_loads(time_DLG * spec.ranks.speed_G, ranks=spec.ranks)
        else:
            evaluation = evaluate(placement, load_PLE=load_PLE, ranks=spec.ranks, dispatch=dispatch)
        priced = pricing.price(
            placement, evaluation, load_PLE=load_PLE, ranks=spec.ranks, token_LTK=one.fit_LTK
        )
        seconds.append(priced)
    return seconds


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
