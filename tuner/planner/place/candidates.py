"""Placements to choose among: what runs, what EPLB's rules make, what the objective's solver finds.

    W workloads   L layers   E experts   M = L - 1 pairs of layers   G ranks

EPLB is given the mean load of the workloads, as an engine that sums its counters would; the better
of its two policies on the planned loads is "the rule" of every comparison.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from solvers.placement.balance.check import layer_times
from solvers.placement.balance.eplb import eplb
from solvers.placement.balance.problem import BalanceProblem, Dispatch, Migration, Robust
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.coactivation.problem import CoactivationProblem
from solvers.placement.ranks import Floats, Ints, Placement, Ranks
from solvers.registry import BALANCE, COACTIVATION
from solvers.result import Claim, Outcome, Status
from tuner.errors import SpecError
from tuner.planner.place.evaluation import judge
from tuner.planner.place.evidence import (
    WorkloadEvidence,
    load_WLE,
    mean_load_LE,
    part_BWLE,
    scatter_BWLE,
    variance_WLE,
    weight_W,
)
from tuner.planner.place.links import LinkCosts
from tuner.planner.place.methods import solve_balance, solve_chain, solve_coactivation
from tuner.planner.place.passes import planned_passes, weighs_passes
from tuner.planner.place.sampled import Tokens
from tuner.planner.place.token_levels import levels_of
from tuner.planner.place.transitions import flow_MEE
from tuner.spec.place import Objective, PlaceGoal, Traffic
from tuner.spec.place_method import Method
from tuner.spec.place_read import PlaceSpec

TRAFFIC = (Objective.CO_ACTIVATION, Objective.LAYER_CHAIN)
"""Objectives about ways; they place every expert once and keep the rule's largest load."""

OnTable = Callable[..., Placement]
"""`known_table.on_table`; takes the problem, placements and `time_limit_s`."""

TABLE_RATIO: Final = 0.6
"""Of a search's time, for placing under the engine's own table, where it is known."""

MOST_STATED: Final = 2
"""Problems of traffic that are kept: the plan's, asked for at each candidate, and one more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rule:
    """The better of EPLB's policies."""

    placement: Placement
    name: str
    largest_L: Floats
    """Load of the busiest rank, on the mean load."""


def balance_problem(
    evidence: Sequence[WorkloadEvidence],
    *,
    goal: PlaceGoal,
    ranks: Ranks,
    dispatch: str,
    active_load: float = 0.0,
    migration: Migration | None = None,
) -> BalanceProblem:
    """State the balance of some of the workloads under a dispatch rule."""
    return BalanceProblem(
        load_WLE=load_WLE(evidence),
        weight_W=weight_W(evidence),
        ranks=ranks,
        robust=Robust(goal.robust.value),
        tail_ratio=goal.tail_ratio,
        active_load=active_load,
        migration=migration,
        dispatch=solved_dispatch(dispatch),
        part_BWLE=part_BWLE(evidence),
        variance_WLE=variance_WLE(evidence),
        scatter_BWLE=scatter_BWLE(evidence),
    )


def solved_dispatch(rule: str) -> Dispatch:
    """Return the rule that a search places for, of a rule of the solvers' sampling.py.

    A draw for each token expects what an even split gives, beside near replicas or without. The
    linear program follows each pass, which a search does not: the split stands for it while
    placements are sought, and bounds nothing. What is found is weighed under the program itself
    (cost.py).
    """
    if rule == Dispatch.STATIC.value:
        return Dispatch.STATIC
    return Dispatch.NEAR if rule.startswith("near_") else Dispatch.EVEN


def rule_of(
    evidence: Sequence[WorkloadEvidence],
    *,
    ranks: Ranks,
    groups: int | None,
    dispatch: str = Dispatch.EVEN.value,
) -> Rule:
    """Plan by EPLB's rules on the mean load and keep what is better under a dispatch rule.

    Under a rule that looks at each pass by itself, on the passes that are planned from.
    """
    mean_LE = mean_load_LE(evidence)
    rules = policies(mean_LE, ranks=ranks, groups=groups)
    mean = BalanceProblem(
        load_WLE=mean_LE[None],
        weight_W=np.ones(1),
        ranks=ranks,
        dispatch=solved_dispatch(dispatch),
    )
    largest = {name: layer_times(mean, placement)[0] for name, placement in rules.items()}
    values = {name: float(largest_L.sum()) for name, largest_L in largest.items()}
    if len(rules) > 1 and weighs_passes(dispatch):
        values = {
            name: _imbalance(evidence, placement, ranks=ranks, dispatch=dispatch)
            for name, placement in rules.items()
        }
    best = min(values, key=lambda name: values[name])
    return Rule(placement=rules[best], name=best, largest_L=largest[best])


def policies(mean_LE: Floats, *, ranks: Ranks, groups: int | None) -> dict[str, Placement]:
    """Place by EPLB's policies, by name; the hierarchical one where it can be had."""
    found = {"eplb": eplb(mean_LE, ranks=ranks)}
    alike = (ranks.slots_G == ranks.slots_G[0]).all()
    if groups is not None and alike and groups % ranks.num_nodes == 0 and ranks.num_nodes > 1:
        found["eplb hierarchical"] = eplb(mean_LE, ranks=ranks, num_groups=groups)
    return found


def beside_search(
    evidence: Sequence[WorkloadEvidence], *, goal: PlaceGoal, ranks: Ranks, dispatch: str
) -> dict[str, Placement]:
    """Place for what a linear program behind near replicas can use, to be weighed beside a search.

    Replicas of an expert that all stand on one node are near to the ranks that hold them alone: all
    other tokens are the program's to steer. EPLB's hierarchical policy with every expert a group of
    its own places them so. The search knows an even split only.
    """
    experts = evidence[0].recording.num_experts
    alike = (ranks.slots_G == ranks.slots_G[0]).all() and experts % ranks.num_nodes == 0
    limited = goal.max_moved_experts is not None or goal.max_moved_bytes is not None
    free = goal.objective not in TRAFFIC and goal.method is Method.AUTO and not limited
    if dispatch != "near_lp" or ranks.num_nodes == 1 or not (alike and free):
        return {}
    return {"replicas on one node": eplb(mean_load_LE(evidence), ranks=ranks, num_groups=experts)}


def _imbalance(
    evidence: Sequence[WorkloadEvidence], placement: Placement, *, ranks: Ranks, dispatch: str
) -> float:
    """Return the mean imbalance of the planned passes under a rule that looks at each of them."""
    values = [
        judge(
            placement, load_PLE=planned_passes(one, dispatch), ranks=ranks, dispatch=dispatch
        ).imbalance
        for one in evidence
    ]
    return float(weight_W(evidence) @ np.array(values))


def solve_objective(
    evidence: Sequence[WorkloadEvidence],
    *,
    goal: PlaceGoal,
    ranks: Ranks,
    rule: Rule,
    dispatch: str,
    links: LinkCosts,
    active_load: float,
    migration: Migration | None,
    time_limit_s: float,
    on_table: OnTable | None = None,
) -> Outcome[Placement]:
    """Place for the goal's objective under a dispatch rule.

    Args:
        evidence: the workloads.
        goal: with the method.
        ranks: that hold the slots.
        rule: what EPLB places.
        dispatch: the rule.
        links: that traffic is priced on.
        active_load: what reading an expert's weights costs, in token copies.
        migration: the limit on moved experts.
        time_limit_s: for all of it.
        on_table: places for the table that the engine draws, where it is known.

    Raises:
        SpecError: the recordings lack what the objective looks at, experts are replicated where it
            knows single ones only, or the goal's method cannot take the problem.
    """
    if goal.objective is Objective.LAYER_CHAIN:
        return solve_chain(
            chain_problem(evidence, goal=goal, ranks=ranks, rule=rule, links=links),
            goal=goal,
            by_rule=rule.placement,
            time_limit_s=time_limit_s,
        )
    if goal.objective is Objective.CO_ACTIVATION:
        return solve_coactivation(
            coactivation_problem(evidence, goal=goal, ranks=ranks, rule=rule, links=links),
            goal=goal,
            by_rule=rule.placement,
            time_limit_s=time_limit_s,
        )
    problem = balance_problem(
        evidence,
        goal=goal,
        ranks=ranks,
        dispatch=dispatch,
        active_load=active_load,
        migration=migration,
    )
    if on_table is None or migration is not None or goal.method is not Method.AUTO:
        return solve_balance(problem, goal=goal, by_rule=rule.placement, time_limit_s=time_limit_s)
    table_s = TABLE_RATIO * time_limit_s
    outcome = solve_balance(problem, goal=goal, time_limit_s=time_limit_s - table_s)
    if outcome.solution is None:
        return outcome
    placement = on_table(problem, (outcome.solution, rule.placement), time_limit_s=table_s)
    claim = Claim(status=Status.FEASIBLE, solution=placement, bound=outcome.bound)
    solve_s = outcome.solve_s + table_s
    return BALANCE.checked(problem, claim, method=outcome.method, solve_s=solve_s)


def others_for_time(
    evidence: Sequence[WorkloadEvidence],
    *,
    goal: PlaceGoal,
    ranks: Ranks,
    rule: Rule,
    dispatch: str,
    links: LinkCosts,
    migration: Migration | None,
    time_limit_s: float,
) -> dict[str, Placement]:
    """Place for what the search for time does not see, to be priced beside it, by name.

    It weighs copies and weights; where the exchange takes the time, the balance of copies alone
    counts, and where tokens are sent once to a place, how many places they reach.
    """
    experts = evidence[0].recording.num_experts
    found = {}
    together = (
        goal.is_merged
        and migration is None
        and ranks.num_slots == experts
        and all(one.planned_LTK is not None for one in evidence)
    )
    limit_s = time_limit_s / (2.0 if together else 1.0)
    problem = balance_problem(
        evidence, goal=goal, ranks=ranks, dispatch=dispatch, migration=migration
    )
    balanced = BALANCE.solve(problem, time_limit_s=limit_s)
    if balanced.solution is not None:
        found["balance of copies"] = balanced.solution
    if together:
        ways = coactivation_problem(evidence, goal=goal, ranks=ranks, rule=rule, links=links)
        near = COACTIVATION.solve(ways, time_limit_s=limit_s)
        if near.solution is not None:
            found["co-activation"] = near.solution
    return found


def chain_problem(
    evidence: Sequence[WorkloadEvidence],
    *,
    goal: PlaceGoal,
    ranks: Ranks,
    rule: Rule,
    links: LinkCosts,
) -> ChainProblem:
    """State the chain of the weighted workloads, each as shares of its tokens."""
    return _planned_chain(tuple(evidence), goal, ranks, rule, links)


@lru_cache(maxsize=MOST_STATED)
def _planned_chain(
    evidence: tuple[WorkloadEvidence, ...],
    goal: PlaceGoal,
    ranks: Ranks,
    rule: Rule,
    links: LinkCosts,
) -> ChainProblem:
    _refuse_replicas(goal, ranks, evidence)
    flows = [flow_MEE(one, Tokens.PLANNED) for one in evidence]
    flow_TEE = np.einsum("w,wmef->mef", weight_W(evidence), np.stack(flows))
    return chain_of(flow_TEE, evidence, goal=goal, ranks=ranks, rule=rule, links=links)


def chain_of(
    flow_TEE: Floats,
    evidence: Sequence[WorkloadEvidence],
    *,
    goal: PlaceGoal,
    ranks: Ranks,
    rule: Rule,
    links: LinkCosts,
) -> ChainProblem:
    """State the chain of other transitions of some workloads."""
    is_busiest = goal.traffic is Traffic.BUSIEST
    return ChainProblem(
        flow_TEE=flow_TEE,
        load_LE=mean_load_LE(evidence),
        ranks=ranks,
        cost_GG=links.cost_GG.copy(),
        most_load_L=rule.largest_L * (1.0 + goal.traffic_slack_ratio),
        measure=Measure.BUSIEST_PAIR if is_busiest else Measure.TOTAL,
    )


def coactivation_problem(
    evidence: Sequence[WorkloadEvidence],
    *,
    goal: PlaceGoal,
    ranks: Ranks,
    rule: Rule,
    links: LinkCosts,
) -> CoactivationProblem:
    """State the co-activation of sampled tokens, of each workload as many as its weight says."""
    return _planned_coactivation(tuple(evidence), goal, ranks, rule, links)


@lru_cache(maxsize=MOST_STATED)
def _planned_coactivation(
    evidence: tuple[WorkloadEvidence, ...],
    goal: PlaceGoal,
    ranks: Ranks,
    rule: Rule,
    links: LinkCosts,
) -> CoactivationProblem:
    _refuse_replicas(goal, ranks, evidence)
    samples = []
    for one in evidence:
        tokens = one.planned_LTK
        if tokens is None:
            raise SpecError(
                f"goal.workloads: {one.name!r} holds no sampled tokens, which objective"
                " co_activation is about; record it with `moetune profile --suite routing`"
            )
        samples.append(tokens)
    weights = weight_W(evidence)
    # The scarcest sample for its weight sets how many tokens there are.
    most = min(s.shape[1] / w for s, w in zip(samples, weights, strict=True))
    taken = [
        sample[:, : max(1, int(most * weight))]
        for sample, weight in zip(samples, weights, strict=True)
    ]
    expert_LTK = np.concatenate(taken, axis=1)
    return coactivation_of(expert_LTK, evidence, goal=goal, ranks=ranks, rule=rule, links=links)


def coactivation_of(
    expert_LTK: Ints,
    evidence: Sequence[WorkloadEvidence],
    *,
    goal: PlaceGoal,
    ranks: Ranks,
    rule: Rule,
    links: LinkCosts,
) -> CoactivationProblem:
    """State the co-activation of other tokens of some workloads."""
    return CoactivationProblem(
        expert_LTK=expert_LTK,
        load_LE=mean_load_LE(evidence),
        ranks=ranks,
        levels=levels_of(links, is_busiest=goal.traffic is Traffic.BUSIEST),
        most_load_L=rule.largest_L * (1.0 + goal.traffic_slack_ratio),
    )


def _refuse_replicas(goal: PlaceGoal, ranks: Ranks, evidence: Sequence[WorkloadEvidence]) -> None:
    experts = evidence[0].recording.num_experts
    if ranks.num_slots != experts:
        raise SpecError(
            f"goal.objective: {goal.objective.value} places every expert once, and"
            f" {ranks.num_slots} slots hold {experts} experts; set redundant_experts to 0, or plan"
            " for balance or layer_time"
        )


def migration_limit(spec: PlaceSpec, *, expert_bytes: float | None) -> Migration | None:
    """Return the goal's limit on moved experts, None without one.

    Raises:
        SpecError: bytes without the size of an expert, or an objective that keeps no limit.
    """
    goal = spec.goal
    limits = [] if goal.max_moved_experts is None else [goal.max_moved_experts]
    if goal.max_moved_bytes is not None:
        if expert_bytes is None:
            raise SpecError("goal.max_moved_bytes: needs model, to size an expert")
        limits.append(int(goal.max_moved_bytes // expert_bytes))
    if not limits:
        return None
    if goal.objective in TRAFFIC:
        raise SpecError(
            f"goal.objective: {goal.objective.value} keeps no limit on moved experts; plan for"
            " balance or layer_time, or drop the limit"
        )
    return Migration(current=spec.current, most_moved=min(limits))
