"""Disaggregated instances: prefill and decode on separate ones, simulated whole.

Where a router has a choice, all instances are simulated together (routed_simulation.py). Instances
may also be packed into cells of one machine or a few (cells.py).

Letters: R requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tuner.config.serve import Role
from tuner.costs.serve.kv_transfer import whole_s
from tuner.search.serve.cells import cell_pools, pools_to_spread
from tuner.search.serve.demand import Demand
from tuner.search.serve.kv_transfers import KvTransfers
from tuner.search.serve.launchable import launchable_options
from tuner.search.serve.modes.mode import ServingMode
from tuner.search.serve.options import Options
from tuner.search.serve.problem import ServeProblem
from tuner.search.serve.routed_simulation import simulate_routed_mode
from tuner.search.serve.routers import RouterChoice
from tuner.search.serve.simulation import (
    MOST_REQUESTS,
    InstanceGroup,
    SimulationResult,
    busy_ratio,
    client_result,
    loop_requests,
    merge_into_slowest,
    option_step_times,
    per_rank,
    prompt_times,
    sample_rank_requests,
)
from tuner.simulate.serving.disaggregated import Stations, simulate_disaggregated
from tuner.simulate.serving.load import Requests
from tuner.spec.serving.goal import ServeGoal


def _price_spread(problem: ServeProblem) -> Options:
    """Price instances with every stage on a machine of its own, for cells of several machines."""
    pools = pools_to_spread(problem.options.options, problem.serving_pools, problem.spec)
    if not pools:
        return Options()
    spread = launchable_options(
        problem.spec,
        pools,
        decoder=problem.decoder,
        formats=problem.formats,
        demand=problem.demand,
        roles=MODE.priced_roles,
        loads=problem.loads,
        is_spread=True,
    )
    # Most layouts that are illegal here are so with stages on one machine, and were counted there.
    return Options(options=spread.options, beaten=spread.beaten)


def _variants(problem: ServeProblem) -> Iterator[ServeProblem]:
    """Yield the problem, and each pool whose machines hold cells."""
    yield problem
    spread = problem.own_options.get("disaggregated", Options())
    options = (*problem.options.options, *spread.options)
    for name, nodes in cell_pools(options, problem.kv_transfers, problem.demand):
        pool_options = tuple(
            option
            for option in options
            if (option.serving_pool.pool.name, option.degrees.stage_machines) == (name, nodes)
        )
        yield replace(
            problem,
            options=replace(problem.options, options=pool_options),
            kv_transfers=replace(problem.kv_transfers, is_packed=True),
            cell_pool=name,
            cell_nodes=nodes,
        )


def _simulate(
    problem: ServeProblem, groups: Sequence[InstanceGroup], router: RouterChoice
) -> SimulationResult:
    if not has_choice(groups):
        return simulate_slowest(problem, groups, router)
    return simulate_routed_mode(
        groups,
        router=router,
        kv_transfers=problem.kv_transfers,
        goal=problem.spec.goal,
        demand=problem.demand,
    )


def has_choice(groups: Sequence[InstanceGroup]) -> bool:
    """Return whether a role has several instances, which must be simulated together."""
    return sum(group.count for group in groups) > 2


def simulate_slowest(
    problem: ServeProblem, groups: Sequence[InstanceGroup], _router: RouterChoice
) -> SimulationResult:
    """Simulate instances of one kind a role, those of the slowest kind standing for all."""
    return simulate_disaggregated_mode(
        *merge_into_slowest(groups),
        kv_transfers=problem.kv_transfers,
        goal=problem.spec.goal,
        demand=problem.demand,
    )


def simulate_disaggregated_mode(
    prefill: InstanceGroup,
    decode: InstanceGroup,
    *,
    kv_transfers: KvTransfers,
    goal: ServeGoal,
    demand: Demand,
    most_requests: int = MOST_REQUESTS,
) -> SimulationResult:
    """Simulate prefill and decode instances.

    Args:
        prefill: groups of one kind.
        decode: the same.
        kv_transfers: paths and refusals of pairs of options.
        goal: with targets and traffic.
        demand: the traffic in numbers.
        most_requests: that are simulated.
    """
    concurrency = demand.concurrency or 0
    demand = demand.on(Role.PREFILL, ranks=prefill.option.degrees.attention_data)
    ranks = max(prefill.ranks, decode.ranks)
    busy = busy_ratio((prefill, decode), rate_per_s=demand.rate_per_s)
    count = (
        loop_requests(goal, concurrency=concurrency)
        if concurrency
        else ranks * per_rank(goal, demand, ranks=ranks, busy_ratio=busy)
    )
    requests = sample_rank_requests(
        goal,
        replace(demand, computed_tokens=demand.input_tokens, cached_N=None),
        count=min(count, most_requests),
        every=1,
        most_tokens=decode.option.kv_tokens,
    )
    served = simulate_disaggregated(
        requests,
        stations=_stations(prefill, decode, kv_transfers, demand, requests),
        concurrency=concurrency,
    )
    return client_result(served, decode, goal=goal, demand=demand, parts=1)


def _stations(
    prefill: InstanceGroup,
    decode: InstanceGroup,
    kv_transfers: KvTransfers,
    demand: Demand,
    requests: Requests,
) -> Stations:
    """Price both sides and the KV transfer between them."""
    path = kv_transfers.path(prefill.option, decode.option)
    token_bytes = kv_transfers.moved(prefill.option, decode.option).peak_rank / kv_transfers.tokens
    return Stations(
        prefill_workers=prefill.count,
        prefill_ranks=prefill.option.degrees.attention_data,
        prompt_s=prompt_times(prefill.option, requests, demand.computed_ratio)[0],
        prefill_slot_ratio=prefill.option.iteration.slot_ratio,
        kv_transfer_s=lambda tokens: whole_s(token_bytes * tokens, path=path),
        decode_ranks=decode.ranks,
        decode=option_step_times(
            decode.option,
            requests,
            most_tokens=decode.option.running + 1,
            most_running=decode.option.running,
        ),
        kv_tokens=decode.option.kv_tokens,
        most_running=decode.option.running,
    )


MODE = ServingMode(
    priced_roles=(Role.PREFILL, Role.DECODE),
    is_routed=True,
    price=_price_spread,
    variants=_variants,
    simulate=_simulate,
)
