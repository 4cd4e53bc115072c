"""Traffic of a placement, where that is the objective.

L layers   T sampled tokens   K experts of a token

co-activation   cost of the domains and ranks that a token's experts touch, summed over layers, per
                token
layer chain     cost of the link from a token's expert to that of the next layer, summed over pairs
                of layers, per token copy

The total, or with `traffic: busiest` that of the most-loaded pair or group (tuner/spec/place.py).
Sampled tokens are split as in tuner/search/place/transitions.py; fit tokens of all workloads form
one problem, hold-out tokens one per workload. In seconds where links are.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from solvers.placement import single_check
from solvers.placement.chain import check as chain_check
from solvers.placement.chain.problem import ChainProblem
from solvers.placement.coactivation import check as coactivation_check
from solvers.placement.ranks import Floats, Ints, Placement
from tuner.plans.place import TrafficTimes
from tuner.search.place.candidates import (
    TRAFFIC,
    EplbBaseline,
    sampled_problem,
    traffic_problem,
)
from tuner.search.place.evidence import WorkloadEvidence
from tuner.search.place.links import LinkCosts
from tuner.search.place.methods import TrafficProblem
from tuner.search.place.transitions import (
    Tokens,
    flow_MEE,
    has_holdout_transitions,
    pairs_MEE,
    sampled_LTK,
    shares_MEE,
)
from tuner.spec.place import Objective, TrafficObjective
from tuner.spec.place_read import PlaceSpec

MAX_BATCHES: Final = 10
"""Batches of hold-out tokens, in order, whose traffic is compared for the noise of a gain."""


def placement_traffic(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    placement: Placement,
    baseline: EplbBaseline,
    links: LinkCosts,
    *,
    tokens: Tokens,
) -> float:
    """Return the traffic of a placement, the weighted mean over workloads."""
    if tokens is Tokens.FIT:
        problem = _stated(spec, evidence, baseline, links)
        return _per_token(problem, placement, links)
    weights = np.array([one.weight_ratio for one in evidence])
    each = [
        workload_traffic(spec, one, placement, baseline, links, tokens=tokens) for one in evidence
    ]
    return float(np.dot(weights / weights.sum(), each))


def traffic_by_name(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    chosen: Placement,
    baseline: EplbBaseline,
    links: LinkCosts,
) -> dict[str, tuple[float, float, float]]:
    """Return traffic before, by EPLB and after; empty where it is not the objective."""
    traffic = traffic_on(spec, evidence, chosen, baseline, links, tokens=Tokens.HOLDOUT)
    return {} if traffic is None else {spec.goal.objective.value: traffic}


def traffic_on(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    chosen: Placement,
    baseline: EplbBaseline,
    links: LinkCosts,
    *,
    tokens: Tokens,
) -> tuple[float, float, float] | None:
    """Return the traffic of the current placement, EPLB's and a given one on some workloads."""
    if spec.goal.objective not in TRAFFIC:
        return None
    before, eplb, after = (
        placement_traffic(spec, evidence, placement, baseline, links, tokens=tokens)
        for placement in (spec.current, baseline.placement, chosen)
    )
    return before, eplb, after


def traffic_times(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    chosen: Placement,
    baseline: EplbBaseline,
    links: LinkCosts,
) -> tuple[TrafficTimes, ...]:
    """Return the traffic of each workload in seconds per pass; empty where links have none."""
    if spec.goal.objective not in TRAFFIC or links.unit_s is None:
        return ()
    times = []
    for one in evidence:
        before, eplb, after = (
            pass_copies(spec, one)
            * workload_traffic(spec, one, placement, baseline, links, tokens=Tokens.HOLDOUT)
            for placement in (spec.current, baseline.placement, chosen)
        )
        holdout_LTK = one.holdout_LTK
        times.append(
            TrafficTimes(
                workload=one.name,
                tokens_judged=0
                if holdout_LTK is None or not has_holdout_transitions(one)
                else holdout_LTK.shape[1],
                before_s=before,
                rule_s=eplb,
                after_s=after,
            )
        )
    return tuple(times)


def pass_copies(spec: PlaceSpec, one: WorkloadEvidence) -> float:
    """Return the factor from traffic per token to that of a pass.

    Of the total a rank sends its share, as all send at once; the most-loaded pair of ranks has its
    own flow, and HierMoE's groups are counted already. Dispatch and combine count twice.
    """
    copies = float(one.holdout_PLE.sum(axis=2).mean())
    ranks = float(spec.ranks.num_ranks)
    if spec.goal.objective is Objective.LAYER_CHAIN:
        is_pair = spec.goal.traffic is TrafficObjective.MOST_LOADED
        return copies if is_pair else copies / ranks
    top_k = float(sampled_LTK(one, Tokens.ALL).shape[2])
    return 2.0 * copies / top_k / ranks


def workload_traffic(
    spec: PlaceSpec,
    one: WorkloadEvidence,
    placement: Placement,
    baseline: EplbBaseline,
    links: LinkCosts,
    *,
    tokens: Tokens,
) -> float:
    """Return the traffic of one workload."""
    is_chain = spec.goal.objective is Objective.LAYER_CHAIN
    sample = flow_MEE(one, tokens) if is_chain else sampled_LTK(one, tokens)
    return _sampled_traffic(spec, one, placement, baseline, links, sample)


def batch_traffic(
    spec: PlaceSpec,
    one: WorkloadEvidence,
    placement: Placement,
    baseline: EplbBaseline,
    links: LinkCosts,
) -> Floats:
    """Return the traffic of batches of the hold-out tokens, for the noise of a gain."""
    token_LTK = sampled_LTK(one, Tokens.HOLDOUT)
    parts = np.array_split(token_LTK, min(MAX_BATCHES, token_LTK.shape[1]), axis=1)
    samples: Sequence[Floats | Ints] = parts
    if spec.goal.objective is Objective.LAYER_CHAIN:
        samples = [shares_MEE(pairs_MEE(part_LTK, spec.num_experts)) for part_LTK in parts]
    return np.array(
        [_sampled_traffic(spec, one, placement, baseline, links, each) for each in samples]
    )


def problem_scale(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    baseline: EplbBaseline,
    links: LinkCosts,
) -> float:
    """Return the divisor from the solver's objective to traffic per token, in seconds if known."""
    return _tokens(_stated(spec, evidence, baseline, links)) / links.scale


def broken_limits(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    placement: Placement,
    baseline: EplbBaseline,
    links: LinkCosts,
) -> tuple[str, ...]:
    """Name the limits of the objective that a placement breaks."""
    return single_check.violations(_stated(spec, evidence, baseline, links), placement)


def _stated(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    baseline: EplbBaseline,
    links: LinkCosts,
) -> TrafficProblem:
    return traffic_problem(
        evidence, goal=spec.goal, ranks=spec.ranks, baseline=baseline, links=links
    )


def _sampled_traffic(
    spec: PlaceSpec,
    one: WorkloadEvidence,
    placement: Placement,
    baseline: EplbBaseline,
    links: LinkCosts,
    sample: Floats | Ints,
) -> float:
    problem = sampled_problem(
        sample, [one], goal=spec.goal, ranks=spec.ranks, baseline=baseline, links=links
    )
    return _per_token(problem, placement, links)


def _per_token(problem: TrafficProblem, placement: Placement, links: LinkCosts) -> float:
    if isinstance(problem, ChainProblem):
        return links.scale * chain_check.objective(problem, placement)
    return links.scale * coactivation_check.objective(problem, placement) / _tokens(problem)


def _tokens(problem: TrafficProblem) -> float:
    """Tokens that an objective is of: flows are shares of one."""
    return 1.0 if isinstance(problem, ChainProblem) else float(problem.expert_LTK.shape[1])
