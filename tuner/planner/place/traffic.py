"""What tokens travel under a placement, per token, where that is the objective.

L layers   T sampled tokens   K experts of a token

co-activation   cost of the ranks and nodes that a token's experts touch, summed over layers, on
                sampled tokens that were not planned from
layer chain     cost of the way from a token copy to the next layer's, summed over pairs of
                layers, on the recorded transitions; they are not told apart by time
"""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from solvers.placement.chain import check as chain_check
from solvers.placement.coactivation import check as coactivation_check
from solvers.placement.ranks import Floats, Ints, Placement
from tuner.planner.place.candidates import (
    TRAFFIC,
    Rule,
    chain_problem,
    coactivation_problem,
    levels_of,
)
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.spec.place import Objective
from tuner.spec.place_read import PlaceSpec


class Tokens(StrEnum):
    """Which of the sampled tokens."""

    PLANNED = "planned"
    JUDGED = "judged"
    ALL = "all"


def traffic_of(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    rule: Rule,
    *,
    tokens: Tokens,
) -> float:
    """Return the traffic of a placement, the weighted mean over workloads."""
    if spec.goal.objective is Objective.LAYER_CHAIN:
        chain = chain_problem(evidence, goal=spec.goal, ranks=spec.ranks, rule=rule)
        return chain_check.objective(chain, placement)
    weights = np.array([one.weight_ratio for one in evidence])
    means = [float(token_costs_T(spec, one, placement, tokens=tokens).mean()) for one in evidence]
    return float(np.dot(weights / weights.sum(), means))


def traffic_by_name(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], chosen: Placement, rule: Rule
) -> dict[str, tuple[float, float, float]]:
    """Return the traffic before, by the rule and after; empty where balance is the objective."""
    found = traffic_on(spec, evidence, chosen, rule, tokens=Tokens.JUDGED)
    return {} if found is None else {spec.goal.objective.value: found}


def traffic_on(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    chosen: Placement,
    rule: Rule,
    *,
    tokens: Tokens,
) -> tuple[float, float, float] | None:
    """Return the traffic of what runs, of the rule and of a placement on some workloads."""
    if spec.goal.objective not in TRAFFIC:
        return None
    before, by_rule, after = (
        traffic_of(spec, evidence, placement, rule, tokens=tokens)
        for placement in (spec.current, rule.placement, chosen)
    )
    return before, by_rule, after


def token_costs_T(
    spec: PlaceSpec, one: WorkloadEvidence, placement: Placement, *, tokens: Tokens
) -> Floats:
    """Return what each sampled token costs under the levels of co-activation."""
    token_LTK = {
        Tokens.PLANNED: one.planned_LTK,
        Tokens.JUDGED: one.judged_LTK,
        Tokens.ALL: one.recording.token_LTK,
    }[tokens]
    if token_LTK is None:
        raise ValueError(f"{one.name!r} holds no sampled tokens")
    cost_T = np.zeros(token_LTK.shape[1])
    for level in levels_of(spec.ranks):
        group_S = level.group_G[spec.ranks.rank_S]
        for expert_S, token_TK in zip(placement.expert_LS, token_LTK, strict=True):
            group_E = np.empty(spec.num_experts, dtype=np.int64)
            group_E[expert_S] = group_S
            cost_T += level.total_cost * _distinct_T(group_E[token_TK])
    return cost_T


def problem_scale(spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], rule: Rule) -> float:
    """Return what the solver's objective is divided by to be per token."""
    if spec.goal.objective is not Objective.CO_ACTIVATION:
        return 1.0
    problem = coactivation_problem(evidence, goal=spec.goal, ranks=spec.ranks, rule=rule)
    return float(problem.expert_LTK.shape[1])


def broken_limits(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], placement: Placement, rule: Rule
) -> tuple[str, ...]:
    """Name the rules of the objective that a placement breaks."""
    if spec.goal.objective is Objective.LAYER_CHAIN:
        chain = chain_problem(evidence, goal=spec.goal, ranks=spec.ranks, rule=rule)
        return chain_check.violations(chain, placement)
    together = coactivation_problem(evidence, goal=spec.goal, ranks=spec.ranks, rule=rule)
    return coactivation_check.violations(together, placement)


def _distinct_T(group_TK: Ints) -> Ints:
    ordered_TK = np.sort(group_TK, axis=1)
    return np.asarray(1 + (ordered_TK[:, 1:] != ordered_TK[:, :-1]).sum(axis=1))
