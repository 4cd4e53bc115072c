"""Aggregated instances: prefill and decode on the same ranks.

Ranks of a group are identical, so that one is simulated and stands for the others. Several kinds,
and routers that follow load, are simulated together (routed_simulation.py).
"""

from collections.abc import Sequence
from functools import partial

from tuner.config.serve import Role
from tuner.search.serve.demand import Demand
from tuner.search.serve.modes.mode import ServingMode
from tuner.search.serve.problem import ServeProblem
from tuner.search.serve.routed_simulation import policy_of, simulate_routed_mode
from tuner.search.serve.routers import RouterChoice
from tuner.search.serve.simulation import (
    MOST_REQUESTS,
    InstanceGroup,
    SimulationResult,
    busy_ratio,
    client_result,
    loop_requests,
    per_rank,
    rank_concurrency,
    sample_rank_requests,
    simulate_by_share,
    simulate_rank,
)
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.routers import RouterPolicy


def _simulate(
    problem: ServeProblem, groups: Sequence[InstanceGroup], router: RouterChoice
) -> SimulationResult:
    goal, demand = problem.spec.goal, problem.demand
    if _are_simulated_together(groups, router):
        return simulate_routed_mode(
            groups, router=router, kv_transfers=problem.kv_transfers, goal=goal, demand=demand
        )
    return simulate_aggregated_mode(groups, goal=goal, demand=demand)


def _are_simulated_together(groups: Sequence[InstanceGroup], router: RouterChoice) -> bool:
    """Return whether instances must be simulated together.

    One instance leaves a router no choice, unless it chooses among ranks; with one kind served
    round robin a single rank stands for all.
    """
    if sum(group.count for group in groups) == 1:
        return router.to_ranks and groups[0].ranks > 1
    return len(groups) > 1 or policy_of(router, groups) is not RouterPolicy.ROUND_ROBIN


def simulate_aggregated_mode(
    groups: Sequence[InstanceGroup], *, goal: ServeGoal, demand: Demand
) -> SimulationResult:
    """Simulate aggregated instances."""
    return simulate_by_share(groups, partial(_simulate_rank, goal=goal, demand=demand), goal=goal)


def _simulate_rank(
    group: InstanceGroup, share: float, *, goal: ServeGoal, demand: Demand
) -> SimulationResult:
    option, ranks = group.option, group.ranks
    demand = demand.on(option.role, ranks=option.degrees.attention_data)
    concurrency = rank_concurrency(demand, share=share, ranks=ranks)
    busy = busy_ratio((group,), rate_per_s=share * demand.rate_per_s)
    requests = sample_rank_requests(
        goal,
        demand,
        count=per_rank(goal, demand, ranks=ranks / share, busy_ratio=busy)
        if demand.concurrency is None
        else min(loop_requests(goal, concurrency=concurrency), max(MOST_REQUESTS, concurrency)),
        every=max(1, round(ranks / share)),
        most_tokens=option.kv_tokens,
    )
    most_running = min(option.running, concurrency) if demand.concurrency else option.running
    served = simulate_rank(option, requests, most_running=most_running, concurrency=concurrency)
    return client_result(served, group, goal=goal, demand=demand, share=share)


MODE = ServingMode(
    priced_roles=(Role.AGGREGATED,),
    is_routed=True,
    simulate=_simulate,
)
