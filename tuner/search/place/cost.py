"""The one evaluator: loads, seconds and traffic of a placement on a part of the evidence.

    L layers   T sampled tokens   K experts of a token   P passes, or batches of tokens

co-activation   cost of the domains and ranks that a token's experts touch, summed over layers, per
                token
layer chain     cost of the link from a token's expert to that of the next layer, summed over pairs
                of layers, per token copy

Traffic is the total, or with `traffic: busiest` that of the most-loaded pair or group
(tuner/spec/place.py), in seconds where links are. Fit tokens of all workloads form one problem,
hold-out tokens one per workload.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from solvers.placement.balance.check import CHOICE_SEED
from solvers.placement.balance.objective import robust_slope
from solvers.placement.chain.problem import ChainProblem
from solvers.placement.ranks import Floats, Ints, Placement
from tuner.costs.place import LayerSeconds
from tuner.search.place.evaluation import SEED, Evaluation, evaluate, scoring_passes
from tuner.search.place.evidence import Split, WorkloadEvidence, transitions_MEE
from tuner.search.place.problem import (
    FAMILIES,
    PlaceProblem,
    TrafficProblem,
    sampled_problem,
    traffic_problem,
)
from tuner.spec.place import Objective, TrafficObjective

MAX_BATCHES: Final = 10
"""Batches of hold-out tokens, in order, whose traffic is compared for the noise of a gain."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkloadCost:
    """One placement on a part of one workload."""

    loads: Evaluation
    load_events: float
    """Recorded token copies on most-loaded ranks, all passes and layers, for counting noise."""
    seconds: LayerSeconds | None
    traffic: float | None
    """Mean over the tokens; None where it is not the objective."""
    value: float
    """Seconds where layers are priced, traffic where that is the objective, otherwise imbalance."""
    value_P: Floats
    """The same of each pass, or of batches of tokens."""
    events: float
    """Recorded events that the value counts."""


def evaluate_workload(
    problem: PlaceProblem,
    workload: WorkloadEvidence,
    placement: Placement,
    *,
    split: Split = Split.HOLDOUT,
    dispatch: str | None = None,
    seed: int = SEED,
) -> WorkloadCost:
    """Evaluate a placement on a part of a workload under the problem's rule, or another one.

    Seconds are those of hold-out passes, and of fit passes where the objective is time; traffic is
    evaluated where it is the objective, that of all fit tokens together by `fit_cost`.
    """
    spec, pricing, rule = problem.spec, problem.pricing, dispatch or problem.dispatch
    # The current placement may have other slots.
    ranks = spec.current_ranks if placement is spec.current else spec.ranks
    is_fit = split is Split.FIT
    load_PLE = scoring_passes(workload, rule) if is_fit else workload.load_PLE(split)
    loads = evaluate(placement, load_PLE=load_PLE, ranks=ranks, dispatch=rule, seed=seed)
    is_time = spec.goal.objective is Objective.LAYER_TIME
    largest = float(loads.copies_PLG.max(axis=2).sum(axis=1).mean())
    load_events = events = largest * len(load_PLE) * workload.recorded_ratio
    seconds = traffic = None
    value_P = loads.imbalance_P
    if spec.goal.is_about_traffic and not is_fit:
        is_chain = spec.goal.objective is Objective.LAYER_CHAIN
        sample = workload.flow_MEE(split) if is_chain else workload.token_LTK(split)
        traffic = traffic_of(problem, sampled_problem(problem, sample), placement)
        value_P, events = np.array([traffic]), math.inf
        if workload.has_holdout_transitions or not is_chain:
            # Of all tokens, no gain is stated.
            is_holdout = split is Split.HOLDOUT
            value_P = batch_traffic(problem, workload, placement) if is_holdout else value_P
        elif workload.recording.transition_MEE is not None:
            # Every pair of a token's choices counts at most, and pairs of one are not independent.
            pairs = float(workload.recording.top_k or 1) ** 2
            events = float(workload.recording.transition_MEE.sum(axis=(1, 2)).mean()) / pairs
    if pricing is not None and (split is Split.HOLDOUT or (is_fit and is_time)):
        seconds = pricing.price(
            placement,
            loads,
            load_PLE=load_PLE,
            ranks=ranks,
            token_LTK=workload.fit_LTK if is_fit else workload.holdout_LTK,
            is_counted=workload.is_counted and not is_fit,
            slow_NN=problem.links.slow_NN,
        )
        value_P, events = seconds.pass_P, load_events
    return WorkloadCost(
        loads=loads,
        load_events=load_events,
        seconds=seconds,
        traffic=traffic,
        value=float(value_P.mean()) if traffic is None or seconds is not None else traffic,
        value_P=value_P,
        events=events,
    )


def batch_traffic(
    problem: PlaceProblem, workload: WorkloadEvidence, placement: Placement
) -> Floats:
    """Return the traffic of batches of a workload's hold-out tokens, in order."""
    token_LTK = workload.token_LTK(Split.HOLDOUT)
    parts = np.array_split(token_LTK, min(MAX_BATCHES, token_LTK.shape[1]), axis=1)
    samples: Sequence[Floats | Ints] = parts
    if problem.spec.goal.objective is Objective.LAYER_CHAIN:
        samples = [transitions_MEE(part_LTK, problem.spec.num_experts) for part_LTK in parts]
    return np.array(
        [traffic_of(problem, sampled_problem(problem, part), placement) for part in samples]
    )


def traffic_of(problem: PlaceProblem, stated: TrafficProblem, placement: Placement) -> float:
    """Return the traffic of a stated problem per token, in seconds where links are."""
    objective = FAMILIES[type(stated)].check.objective(stated, placement)
    return objective / traffic_scale(problem, stated)


def traffic_scale(problem: PlaceProblem, stated: TrafficProblem) -> float:
    """Return the divisor from the solver's objective to traffic per token: flows are shares."""
    tokens = 1.0 if isinstance(stated, ChainProblem) else float(stated.expert_LTK.shape[1])
    return tokens / problem.links.scale


def pass_copies(problem: PlaceProblem, workload: WorkloadEvidence) -> float:
    """Return the factor from traffic per token to that of a pass.

    Of the total a rank sends its share, as all send at once; the most-loaded pair of ranks has its
    own flow, and HierMoE's groups are counted already. Dispatch and combine count twice.
    """
    goal = problem.spec.goal
    copies = float(workload.holdout_PLE.sum(axis=2).mean())
    if goal.objective is Objective.CO_ACTIVATION:
        copies *= 2.0 / workload.token_LTK(Split.ALL).shape[2]
    elif goal.traffic is TrafficObjective.MOST_LOADED:
        return copies
    return copies / problem.spec.ranks.num_ranks


def fit_cost(problem: PlaceProblem, placement: Placement, *, seed: int = CHOICE_SEED) -> float:
    """Return the objective on the fit passes; by default not over the certificate's launches."""
    if problem.spec.goal.is_about_traffic:
        return traffic_of(problem, traffic_problem(problem), placement)
    values = [
        evaluate_workload(problem, workload, placement, split=Split.FIT, seed=seed).value
        for workload in problem.evidence
    ]
    return robust(problem, values)


def robust(problem: PlaceProblem, values: Sequence[float]) -> float:
    """Combine the workloads' values as the goal says."""
    return float(np.dot(robust_weights(problem, values), values))


def robust_weights(problem: PlaceProblem, values: Sequence[float]) -> Floats:
    """Return the weight of each workload at these values; sums to 1."""
    # The weights depend on the values alone.
    return robust_slope(problem.balance(), np.asarray(values, dtype=np.float64))
