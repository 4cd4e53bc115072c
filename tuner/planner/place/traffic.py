"""What tokens travel under a placement, where that is the objective.

L layers   T sampled tokens   K experts of a token

co-activation   cost of the domains and ranks that a token's experts touch, summed over layers, a
                token
layer chain     cost of the way from a token copy to the next layer's, summed over pairs of layers,
                a token copy

The total, or with `traffic: busiest` what the others wait for (tuner/spec/place.py). Planned from
and judged on the sampled tokens as tuner/planner/place/transitions.py parts them; what was planned
from is one problem of all workloads, on other tokens each workload stands by itself. In seconds
where links are.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from solvers.placement.chain import check as chain_check
from solvers.placement.coactivation import check as coactivation_check
from solvers.placement.ranks import Floats, Ints, Placement
from tuner.place_plan import TrafficTimes
from tuner.planner.place.candidates import (
    TRAFFIC,
    Rule,
    chain_of,
    chain_problem,
    coactivation_of,
    coactivation_problem,
)
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.links import LinkCosts
from tuner.planner.place.sampled import Tokens, sampled_LTK
from tuner.planner.place.transitions import flow_MEE, is_judged_apart, pairs_MEE, shares_MEE
from tuner.spec.place import Objective, Traffic
from tuner.spec.place_read import PlaceSpec

MOST_STRETCHES: Final = 10
"""Of judged tokens, in their order, whose traffic is compared for the noise of a gain."""


def traffic_of(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    rule: Rule,
    links: LinkCosts,
    *,
    tokens: Tokens,
) -> float:
    """Return the traffic of a placement, the weighted mean over workloads."""
    if tokens is Tokens.PLANNED:
        return _planned(spec, evidence, placement, rule, links) / problem_scale(
            spec, evidence, rule, links
        )
    weights = np.array([one.weight_ratio for one in evidence])
    each = [traffic_on_one(spec, one, placement, rule, links, tokens=tokens) for one in evidence]
    return float(np.dot(weights / weights.sum(), each))


def traffic_by_name(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    chosen: Placement,
    rule: Rule,
    links: LinkCosts,
) -> dict[str, tuple[float, float, float]]:
    """Return the traffic before, by the rule and after; empty where it is not the objective."""
    found = traffic_on(spec, evidence, chosen, rule, links, tokens=Tokens.JUDGED)
    return {} if found is None else {spec.goal.objective.value: found}


def traffic_on(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    chosen: Placement,
    rule: Rule,
    links: LinkCosts,
    *,
    tokens: Tokens,
) -> tuple[float, float, float] | None:
    """Return the traffic of what runs, of the rule and of a placement on some workloads."""
    if spec.goal.objective not in TRAFFIC:
        return None
    before, by_rule, after = (
        traffic_of(spec, evidence, placement, rule, links, tokens=tokens)
        for placement in (spec.current, rule.placement, chosen)
    )
    return before, by_rule, after


def traffic_times(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    chosen: Placement,
    rule: Rule,
    links: LinkCosts,
) -> tuple[TrafficTimes, ...]:
    """Return the seconds of each workload's pass; nothing where links have none."""
    if spec.goal.objective not in TRAFFIC or links.unit_s is None:
        return ()
    times = []
    for one in evidence:
        before, by_rule, after = (
            pass_copies(spec, one)
            * traffic_on_one(spec, one, placement, rule, links, tokens=Tokens.JUDGED)
            for placement in (spec.current, rule.placement, chosen)
        )
        judged = one.judged_LTK
        times.append(
            TrafficTimes(
                workload=one.name,
                tokens_judged=0 if judged is None or not is_judged_apart(one) else judged.shape[1],
                before_s=before,
                rule_s=by_rule,
                after_s=after,
            )
        )
    return tuple(times)


def pass_copies(spec: PlaceSpec, one: WorkloadEvidence) -> float:
    """Return what traffic a token is multiplied by to be that of a pass.

    Of the total a rank sends its share, as all send at once; the busiest pair of ranks has its flow
    to itself, and HierMoE's groups are counted in already. Dispatch and combine are two ways.
    """
    copies = float(one.judged_PLE.sum(axis=2).mean())
    ranks = float(spec.ranks.num_ranks)
    if spec.goal.objective is Objective.LAYER_CHAIN:
        is_pair = spec.goal.traffic is Traffic.BUSIEST
        return copies if is_pair else copies / ranks
    top_k = float(sampled_LTK(one, Tokens.ALL).shape[2])
    return 2.0 * copies / top_k / ranks


def traffic_on_one(
    spec: PlaceSpec,
    one: WorkloadEvidence,
    placement: Placement,
    rule: Rule,
    links: LinkCosts,
    *,
    tokens: Tokens,
) -> float:
    """Return the traffic of one workload."""
    if spec.goal.objective is Objective.LAYER_CHAIN:
        return _chain_costs(spec, one, placement, rule, links, [flow_MEE(one, tokens)])[0]
    return _token_costs(spec, one, placement, rule, links, [sampled_LTK(one, tokens)])[0]


def stretches(
    spec: PlaceSpec, one: WorkloadEvidence, placement: Placement, rule: Rule, links: LinkCosts
) -> Floats:
    """Return the traffic of stretches of the judged tokens, for the noise of a gain."""
    token_LTK = sampled_LTK(one, Tokens.JUDGED)
    parts = np.array_split(token_LTK, min(MOST_STRETCHES, token_LTK.shape[1]), axis=1)
    if spec.goal.objective is Objective.LAYER_CHAIN:
        flows = [shares_MEE(pairs_MEE(part_LTK, spec.num_experts)) for part_LTK in parts]
        return np.array(_chain_costs(spec, one, placement, rule, links, flows))
    return np.array(_token_costs(spec, one, placement, rule, links, parts))


def problem_scale(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], rule: Rule, links: LinkCosts
) -> float:
    """Return what the solver's objective is divided by to be per token, in seconds if known."""
    if spec.goal.objective is not Objective.CO_ACTIVATION:
        return 1.0 / links.scale
    problem = coactivation_problem(
        evidence, goal=spec.goal, ranks=spec.ranks, rule=rule, links=links
    )
    return float(problem.expert_LTK.shape[1]) / links.scale


def broken_limits(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    rule: Rule,
    links: LinkCosts,
) -> tuple[str, ...]:
    """Name the rules of the objective that a placement breaks."""
    if spec.goal.objective is Objective.LAYER_CHAIN:
        chain = chain_problem(evidence, goal=spec.goal, ranks=spec.ranks, rule=rule, links=links)
        return chain_check.violations(chain, placement)
    together = coactivation_problem(
        evidence, goal=spec.goal, ranks=spec.ranks, rule=rule, links=links
    )
    return coactivation_check.violations(together, placement)


def _planned(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    rule: Rule,
    links: LinkCosts,
) -> float:
    if spec.goal.objective is Objective.LAYER_CHAIN:
        chain = chain_problem(evidence, goal=spec.goal, ranks=spec.ranks, rule=rule, links=links)
        return chain_check.objective(chain, placement)
    together = coactivation_problem(
        evidence, goal=spec.goal, ranks=spec.ranks, rule=rule, links=links
    )
    return coactivation_check.objective(together, placement)


def _chain_costs(
    spec: PlaceSpec,
    one: WorkloadEvidence,
    placement: Placement,
    rule: Rule,
    links: LinkCosts,
    flows: Sequence[Floats],
) -> list[float]:
    chains = (
        chain_of(flow, [one], goal=spec.goal, ranks=spec.ranks, rule=rule, links=links)
        for flow in flows
    )
    return [links.scale * chain_check.objective(chain, placement) for chain in chains]


def _token_costs(
    spec: PlaceSpec,
    one: WorkloadEvidence,
    placement: Placement,
    rule: Rule,
    links: LinkCosts,
    samples: Sequence[Ints],
) -> list[float]:
    problems = (
        coactivation_of(token_LTK, [one], goal=spec.goal, ranks=spec.ranks, rule=rule, links=links)
        for token_LTK in samples
    )
    return [
        links.scale * coactivation_check.objective(problem, placement) / problem.expert_LTK.shape[1]
        for problem in problems
    ]
