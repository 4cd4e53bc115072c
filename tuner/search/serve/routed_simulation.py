"""Simulates the traffic on all instances of a mode at once, as its router spreads it.

Large deployments are simulated on a share of their instances, which gets that share of the
requests: a router with fewer to choose from evens out less, so that waits are not too short. The
share is small enough that each rank gets the requests it needs (`per_rank`) within all that are
simulated, where the numbers of instances have such a divisor.

Letters: R requests.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tuner.catalog.serve_rules.traits import Batching
from tuner.config.serve import Role
from tuner.costs.serve.kv_transfer import whole_s
from tuner.search.serve.demand import Demand
from tuner.search.serve.kv_transfers import KvTransfers
from tuner.search.serve.routers import RouterChoice
from tuner.search.serve.simulation import (
    MOST_REQUESTS,
    Floats,
    InstanceGroup,
    Ints,
    SimulationResult,
    busy_ratio,
    loop_requests,
    option_step_times,
    per_rank,
    prompt_times,
    reached_rate,
    sample_rank_requests,
    to_simulation_result,
)
from tuner.simulate.serving.batching import Rules
from tuner.simulate.serving.client import (
    client_observed_ttft_s,
    engine_client,
    engine_rules,
    waiting_ranks,
)
from tuner.simulate.serving.load import Requests, Served
from tuner.simulate.serving.lockstep import beside_peers
from tuner.simulate.serving.routed import (
    PrefillInstances,
    RequestRouting,
    Routed,
    RoutedInstances,
    simulate_routed,
)
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.routers import RouterPolicy

MOST_RANKS: Final = 32
"""Simulated at once, where instances have fewer."""


def policy_of(router: RouterChoice, groups: Sequence[InstanceGroup]) -> RouterPolicy:
    """Return the policy of aggregated or prefill instances: one kind or several."""
    reading = [group for group in groups if group.option.role is not Role.DECODE]
    return router.policy if len(reading) == 1 else router.mixed_policy


def simulate_routed_mode(
    groups: Sequence[InstanceGroup],
    *,
    router: RouterChoice,
    kv_transfers: KvTransfers,
    goal: ServeGoal,
    demand: Demand,
) -> SimulationResult:
    """Simulate instances behind their router.

    Args:
        groups: equal instances each, aggregated ones or prefill and decode ones.
        router: how requests are spread.
        kv_transfers: paths and refusals of pairs of options.
        goal: with targets and traffic.
        demand: the traffic in numbers.
    """
    serving = [group for group in groups if group.option.role is not Role.PREFILL]
    prefilling = [group for group in groups if group.option.role is Role.PREFILL]
    first = (prefilling or serving)[0].option
    counted = demand.on(first.role, ranks=first.degrees.attention_data)
    if counted.cached_N is not None:
        demand = replace(counted, hits_by_ranks=None)
    is_open = demand.concurrency is None
    every = _part(
        groups,
        ranks=sum(group.ranks for group in serving),
        num_requests=_open_requests(serving, prefilling, 1, goal, demand) if is_open else 0,
    )
    requests = _requests(serving, every=every, prefilling=prefilling, goal=goal, demand=demand)
    total_per_s = sum(group.rate_per_s for group in serving)
    kinds = [
        _instances(
            group,
            requests,
            every,
            is_disaggregated=bool(prefilling),
            to_ranks=router.to_ranks,
            demand=demand,
            rank_share=group.rate_per_s / (total_per_s * group.ranks),
        )
        for group in serving
    ]
    routed = simulate_routed(
        requests,
        kinds=kinds,
        prefills=[
            _prefills(group, serving, requests, every, kv_transfers=kv_transfers, demand=demand)
            for group in prefilling
        ],
        routing=RequestRouting(
            policy=policy_of(router, groups),
            decode_policy=router.decode_policy or RouterPolicy.LEAST_REQUESTS,
            holds_prefill=router.holds_prefill,
            # Hits of recorded prompts were counted under the router already.
            has_sessions=router.has_sessions and demand.cached_N is None,
        ),
        concurrency=_concurrency(demand, every),
    )
    rate = reached_rate(routed.served, ranks=every, goal=goal, comes_per_s=demand.rate_per_s)
    places = [kind.count for kind in kinds]
    ttft_s_R, tpot_s_R = _seen(routed, serving, places)
    return to_simulation_result(
        ttft_s_R,
        tpot_s_R,
        goal=goal,
        rate=rate,
        tokens=rate * float(routed.served.output_R.mean()),
    )


def _part(groups: Sequence[InstanceGroup], *, ranks: int, num_requests: int) -> int:
    """Return the divisor of all counts by which ranks and requests become few enough.

    Two instances of every kind are left, among which the router chooses.
    """
    fewest = min(group.count for group in groups)
    divisors = [
        every
        for every in range(1, max(fewest // 2, 1) + 1)
        if all(group.count % every == 0 for group in groups)
    ]
    by_ranks = max(every for every in divisors if every <= max(-(-ranks // MOST_RANKS), 1))
    wanted = -(-num_requests // MOST_REQUESTS)
    by_requests = next((every for every in divisors if every >= wanted), divisors[-1])
    return max(by_ranks, by_requests)


def _concurrency(demand: Demand, every: int) -> int:
    return max(1, (demand.concurrency or 1) // every)


def _requests(
    serving: Sequence[InstanceGroup],
    *,
    every: int,
    prefilling: Sequence[InstanceGroup],
    goal: ServeGoal,
    demand: Demand,
) -> Requests:
    """Draw what the simulated instances get: of the rank with the fewest as many as elsewhere."""
    count = _open_requests(serving, prefilling, every, goal, demand)
    if demand.concurrency is not None:
        count = loop_requests(goal, concurrency=_concurrency(demand, every))
    return sample_rank_requests(
        goal,
        # A prefill worker's seconds know what the cache holds.
        replace(demand, computed_tokens=demand.input_tokens, cached_N=None)
        if prefilling
        else demand,
        count=min(MOST_REQUESTS, count),
        every=every,
        most_tokens=min(group.option.kv_tokens for group in serving),
    )


def _open_requests(
    serving: Sequence[InstanceGroup],
    prefilling: Sequence[InstanceGroup],
    every: int,
    goal: ServeGoal,
    demand: Demand,
) -> int:
    """Return the requests of an open load: those stated, or so many that all ranks get enough."""
    if goal.traffic.requests is not None:
        return max(1, goal.traffic.requests // every)
    least = min(_least_share(groups, every) for groups in (serving, prefilling))
    busy = busy_ratio((*serving, *prefilling), rate_per_s=demand.rate_per_s)
    return round(per_rank(goal, demand, ranks=1.0, busy_ratio=busy) / least)


def _least_share(groups: Sequence[InstanceGroup], every: int) -> float:
    """Return the share of a role's requests that the rank with the fewest gets; 1 without any."""
    total = sum(group.count // every * group.option.rate_per_s for group in groups)
    return min(
        (group.option.rate_per_s / group.option.degrees.attention_data / total for group in groups),
        default=1.0,
    )


def _found_ratio(group: InstanceGroup, demand: Demand) -> float:
    """Return the share of an instance's requests that come to the rank with their prefix."""
    option = group.option
    return demand.on(option.role, ranks=option.degrees.attention_data).request_ratio


def _instances(
    group: InstanceGroup,
    requests: Requests,
    every: int,
    *,
    is_disaggregated: bool,
    to_ranks: bool,
    demand: Demand,
    rank_share: float,
) -> RoutedInstances:
    option, ranks = group.option, group.option.degrees.attention_data
    places = ranks if to_ranks else 1
    times = option_step_times(
        option,
        requests,
        most_tokens=option.running + (1 if is_disaggregated else option.step_tokens),
        most_running=option.running,
    )
    if is_disaggregated:
        rules = Rules(
            batching=Batching.CHUNKED,
            step_tokens=option.running + 1,
            kv_tokens=option.kv_tokens,
            most_running=option.running,
            reserves_output=False,
            preempts=False,
        )
    else:
        rules = engine_rules(
            option.iteration.traits,
            step_tokens=option.step_tokens,
            kv_tokens=option.kv_tokens,
            most_running=option.running,
            is_chunked=option.is_chunked,
        )
        times = beside_peers(
            times,
            requests=requests,
            rules=rules,
            ranks=waiting_ranks(option.iteration),
            rate_per_s=rank_share * demand.rate_per_s if demand.concurrency is None else math.inf,
            concurrency=rank_share * (demand.concurrency or math.inf),
        )
    return RoutedInstances(
        count=group.count // every * places,
        ranks=ranks // places,
        times=times,
        rules=rules,
        weight=float(option.running * ranks // places),
        found_ratio=_found_ratio(group, demand),
    )


def _prefills(
    group: InstanceGroup,
    serving: Sequence[InstanceGroup],
    requests: Requests,
    every: int,
    *,
    kv_transfers: KvTransfers,
    demand: Demand,
) -> PrefillInstances:
    option = group.option
    paths = [
        (
            kv_transfers.moved(option, receiver.option).peak_rank / kv_transfers.tokens,
            kv_transfers.path(option, receiver.option),
        )
        for receiver in serving
    ]
    prompt_s, whole_prompt_s = prompt_times(option, requests, demand.computed_ratio, 1.0)
    return PrefillInstances(
        count=group.count // every,
        ranks=option.degrees.attention_data,
        prompt_s=prompt_s,
        whole_prompt_s=whole_prompt_s,
        kv_transfer_s_by_kind=[
            lambda tokens, size=size, path=path: whole_s(size * tokens, path=path)  # type: ignore[misc]  # bound early
            for size, path in paths
        ],
        weight=float(option.running * option.degrees.attention_data),
        slot_ratio=option.iteration.slot_ratio,
        found_ratio=_found_ratio(group, demand),
    )


def _seen(
    routed: Routed, serving: Sequence[InstanceGroup], places: Sequence[int]
) -> tuple[Floats, Floats]:
    """Return TTFT and TPOT of all requests as clients see them, one kind of instances at a time."""
    kind_of = np.repeat(np.arange(len(serving)), places)
    ttft, tpot = [], []
    for number, group in enumerate(serving):
        own_R: Ints = np.flatnonzero(kind_of[routed.place_R] == number)
        if not len(own_R):
            continue
        part = Served(
            arrival_s_R=routed.served.arrival_s_R[own_R],
            first_token_s_R=routed.served.first_token_s_R[own_R],
            end_s_R=routed.served.end_s_R[own_R],
            output_R=routed.served.output_R[own_R],
        )
        ttft.append(client_observed_ttft_s(part, client=engine_client(group.option.iteration)))
        tpot.append(part.tpot_s_R)
    return np.concatenate(ttft), np.concatenate(tpot)
