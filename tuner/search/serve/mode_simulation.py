"""Simulates the multiplexed mode, and long prompts prefilled on another pool.

Multiplexed devices: one instance is simulated (tuner/simulate/serving/shared.py) and stands for the
others of its group.

Offloaded prompts: remote ranks prefill first come first served, each by itself; nothing on the
local side delays them, so they are simulated first. The local ranks then see short prompts on
arrival and long ones when their KV caches arrive. In a closed loop, where finished requests send
the next ones, long ones are delayed by the remote side: those of the first burst queue there
together, later ones wait by Allen and Cunneen's form (tuner/costs/serve/queueing.py).

Letters: R requests.
"""

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tuner.config.serve import Role
from tuner.costs.serve.kv_transfer import whole_s
from tuner.costs.serve.queueing import mean_wait_s
from tuner.search.serve.demand import Demand
from tuner.search.serve.kv_transfers import KvTransfers
from tuner.search.serve.multiplexing import split_iteration
from tuner.search.serve.remote_prefill import LengthThreshold
from tuner.search.serve.routed_simulation import policy_of, simulate_routed_mode
from tuner.search.serve.routers import ROUTED, RouterChoice
from tuner.search.serve.simulation import (
    MOST_REQUESTS,
    Floats,
    InstanceGroup,
    SimulationResult,
    busy_ratio,
    loop_requests,
    mix_results,
    option_step_times,
    per_rank,
    prompt_times,
    reached_rate,
    sample_rank_requests,
    simulate_aggregated_mode,
    simulate_disaggregated_mode,
    simulate_rank,
    to_simulation_result,
)
from tuner.simulate.serving.client import client_observed_ttft_s, engine_client
from tuner.simulate.serving.load import Requests, Served
from tuner.simulate.serving.shared import Phases, simulate_shared
from tuner.spec.serving.goal import Mode, ServeGoal
from tuner.spec.serving.routers import RouterPolicy

Flags = npt.NDArray[np.bool_]


def simulate_mode(
    mode: Mode,
    groups: Sequence[InstanceGroup],
    *,
    router: RouterChoice,
    threshold: LengthThreshold | None,
    kv_transfers: KvTransfers,
    goal: ServeGoal,
    demand: Demand,
) -> SimulationResult:
    """Simulate instances of any mode that has a program.

    Args:
        mode: of them.
        groups: equal instances each.
        router: how requests are spread over them.
        threshold: where long prompts are read on another pool.
        kv_transfers: paths and refusals of pairs of options.
        goal: with targets and traffic.
        demand: the traffic in numbers.
    """
    if is_routed(mode, groups, router):
        return simulate_routed_mode(
            groups, router=router, kv_transfers=kv_transfers, goal=goal, demand=demand
        )
    if mode == "aggregated":
        return simulate_aggregated_mode(groups, goal=goal, demand=demand)
    if mode == "shared_device":
        return simulate_shared_mode(groups, goal=goal, demand=demand)
    prefill = _merge_into_slowest([group for group in groups if group.option.role is Role.PREFILL])
    others = _merge_into_slowest(
        [group for group in groups if group.option.role is not Role.PREFILL]
    )
    if threshold is not None:
        return simulate_offload_mode(
            prefill, others, threshold, kv_transfers=kv_transfers, goal=goal, demand=demand
        )
    return simulate_disaggregated_mode(
        prefill, others, kv_transfers=kv_transfers, goal=goal, demand=demand
    )


def is_routed(mode: Mode, groups: Sequence[InstanceGroup], router: RouterChoice) -> bool:
    """Return whether instances must be simulated together.

    One instance of a role leaves a router no choice, unless it chooses among ranks; with one kind
    served round robin a single rank stands for all.
    """
    if mode not in ROUTED:
        return False
    serving = [group for group in groups if group.option.role is not Role.PREFILL]
    if mode == "disaggregated":
        return sum(group.count for group in groups) > 2
    if sum(group.count for group in serving) == 1:
        return router.to_ranks and serving[0].ranks > 1
    return len(serving) > 1 or policy_of(router, groups) is not RouterPolicy.ROUND_ROBIN


def _merge_into_slowest(groups: Sequence[InstanceGroup]) -> InstanceGroup:
    """Let the slowest kind stand for all of a role, as many as have the same total rate."""
    slowest = min(groups, key=lambda group: group.option.rate_per_s / group.option.devices)
    rate = sum(group.rate_per_s for group in groups)
    return InstanceGroup(option=slowest.option, count=max(1, int(rate / slowest.option.rate_per_s)))


def simulate_shared_mode(
    groups: Sequence[InstanceGroup], *, goal: ServeGoal, demand: Demand
) -> SimulationResult:
    """Simulate instances that multiplex prefill and decode."""
    total = sum(group.rate_per_s for group in groups)
    shares = [group.rate_per_s / total for group in groups]
    parts = [
        _simulate_shared_group(group, share=share, goal=goal, demand=demand)
        for group, share in zip(groups, shares, strict=True)
    ]
    return mix_results(parts, goal=goal, weights=shares)


def _simulate_shared_group(
    group: InstanceGroup, *, share: float, goal: ServeGoal, demand: Demand
) -> SimulationResult:
    option, ranks = group.option, group.ranks
    if option.prefill_share_ratio is None:
        raise ValueError("a shared instance states its share")
    demand = demand.on(option.role, ranks=option.degrees.attention_data)
    concurrency = _rank_concurrency(demand, share=share, ranks=ranks)
    requests = sample_rank_requests(
        goal,
        demand,
        count=loop_requests(goal, concurrency=concurrency)
        if demand.concurrency is not None
        else per_rank(
            goal,
            demand,
            ranks=ranks / share,
            busy_ratio=busy_ratio((group,), rate_per_s=share * demand.rate_per_s),
        ),
        every=max(1, round(ranks / share)),
        most_tokens=option.kv_tokens,
    )
    reading, writing = split_iteration(
        option.iteration, option.prefill_share_ratio, demand, step_tokens=option.step_tokens
    )
    most_tokens = max(option.step_tokens, int(requests.input_R.max()))
    isolated, multiplexed = (
        option_step_times(
            replace(option, iteration=iteration),
            requests,
            most_tokens=most_tokens,
            most_running=option.running,
        )
        for iteration in (option.iteration, writing)
    )
    served = simulate_shared(
        requests,
        phases=Phases(
            isolated_prompts=isolated,
            multiplexed_prompts=option_step_times(
                replace(option, iteration=reading),
                requests,
                most_tokens=most_tokens,
                most_running=2,
            ),
            isolated_steps=isolated,
            multiplexed_steps=multiplexed,
            step_tokens=option.step_tokens,
            kv_tokens=option.kv_tokens,
            most_running=option.running,
        ),
        concurrency=concurrency,
    )
    return _to_client_result(served, group, demand=demand, goal=goal, share=share)


def simulate_offload_mode(
    remote: InstanceGroup,
    local: InstanceGroup,
    threshold: LengthThreshold,
    *,
    kv_transfers: KvTransfers,
    goal: ServeGoal,
    demand: Demand,
) -> SimulationResult:
    """Simulate a remote side for long prompts and local instances for all the rest."""
    ranks = local.ranks
    concurrency = _rank_concurrency(demand, share=1.0, ranks=ranks)
    is_closed = demand.concurrency is not None
    busy = busy_ratio((local,), rate_per_s=demand.rate_per_s)
    count = min(MOST_REQUESTS, ranks * per_rank(goal, demand, ranks=ranks, busy_ratio=busy))
    if is_closed:
        count = loop_requests(goal, concurrency=concurrency)
    requests = sample_rank_requests(
        goal, demand, count=count, every=1, most_tokens=local.option.kv_tokens
    )
    computed_R = (
        requests.input_R if requests.cached_R is None else requests.input_R - requests.cached_R
    )
    long_R = computed_R > threshold.above_tokens
    read_s_R, sent_s_R = _remote_s(
        remote, local, requests, kv_transfers=kv_transfers, demand=demand
    )
    late_s_R = np.where(long_R, read_s_R + sent_s_R, 0.0)
    if requests.arrival_s_R is None:
        late_s_R[long_R] += _mean_wait_s(remote, read_s_R[long_R], threshold, demand)
        late_s_R[:concurrency] = np.where(
            long_R[:concurrency],
            (read_s_R + sent_s_R)[:concurrency]
            + _burst_wait_s(remote, read_s_R[:concurrency], long_R[:concurrency], ranks=ranks),
            0.0,
        )
        delay_s_R = late_s_R if requests.delay_s_R is None else requests.delay_s_R + late_s_R
        rank_requests = replace(requests, delay_s_R=delay_s_R, prefilled_R=long_R)
    else:
        late_s_R[long_R] += waits_s(requests.arrival_s_R[long_R], read_s_R[long_R], remote.ranks)
        rank_requests, late_s_R = _single_rank(requests, late_s_R, long_R, ranks=ranks)
    option = local.option
    running = min(option.running, concurrency) if is_closed else option.running
    served = simulate_rank(option, rank_requests, most_running=running, concurrency=concurrency)
    sent = replace(served, arrival_s_R=served.arrival_s_R - late_s_R)
    return _to_client_result(sent, local, demand=demand, goal=goal, share=1.0)


def _remote_s(
    remote: InstanceGroup,
    local: InstanceGroup,
    requests: Requests,
    *,
    kv_transfers: KvTransfers,
    demand: Demand,
) -> tuple[Floats, Floats]:
    """Seconds of each prompt on the remote side, and of its KV transfer to the local one."""
    [prompt_s] = prompt_times(remote.option, requests, demand.computed_ratio)
    path = kv_transfers.path(remote.option, local.option)
    token_bytes = kv_transfers.moved(remote.option, local.option).peak_rank / kv_transfers.tokens
    busy = remote.option.degrees.attention_data
    tokens_U, place_R = np.unique(requests.input_R, return_inverse=True)
    read_s_U = np.array([prompt_s(int(tokens), busy) for tokens in tokens_U])
    sent_s_U = np.array([whole_s(token_bytes * int(tokens), path=path) for tokens in tokens_U])
    return read_s_U[place_R], sent_s_U[place_R]


def waits_s(arrival_s_R: Floats, seconds_R: Floats, servers: int) -> Floats:
    """Wait of each request for one of equal servers, first come first served."""
    free_s = [0.0] * servers
    waits = []
    for at_s, seconds in zip(arrival_s_R.tolist(), seconds_R.tolist(), strict=True):
        begin_s = max(at_s, free_s[0])
        heapq.heapreplace(free_s, begin_s + seconds)
        waits.append(begin_s - at_s)
    return np.array(waits)


def _burst_wait_s(remote: InstanceGroup, read_s_R: Floats, long_R: Flags, *, ranks: int) -> Floats:
    """Wait of one rank's first requests, where as many of every other rank come at once."""
    every_s = np.repeat(np.where(long_R, read_s_R, 0.0), ranks)
    return waits_s(np.zeros(len(every_s)), every_s, remote.ranks)[::ranks]


def _mean_wait_s(
    remote: InstanceGroup, seconds_R: Floats, threshold: LengthThreshold, demand: Demand
) -> float:
    """Mean wait for the remote side at the rate that the targets ask for.

    No longer than behind all long prompts of the loop at once.
    """
    if not len(seconds_R):
        return 0.0
    mean_s = float(seconds_R.mean())
    waits_s = mean_wait_s(
        rate_per_s=demand.rate_per_s * threshold.long_share,
        service_s=mean_s,
        servers=remote.ranks,
        service_cv2=float(seconds_R.var()) / mean_s**2,
    )
    in_flight = (demand.concurrency or 0) * threshold.long_share
    return min(waits_s, in_flight * mean_s / remote.ranks)


def _single_rank(
    requests: Requests, late_s_R: Floats, long_R: Flags, *, ranks: int
) -> tuple[Requests, Floats]:
    """Return the requests of one of so many local ranks, in the order in which they arrive."""
    if requests.arrival_s_R is None:
        raise ValueError("open arrivals are needed")
    there_s_R = requests.arrival_s_R + late_s_R
    own_R = np.argsort(there_s_R, kind="stable")[::ranks]
    part = Requests(
        input_R=requests.input_R[own_R],
        output_R=requests.output_R[own_R],
        arrival_s_R=there_s_R[own_R],
        cached_R=None if requests.cached_R is None else requests.cached_R[own_R],
        prefilled_R=long_R[own_R],
    )
    return part, late_s_R[own_R]


def _rank_concurrency(demand: Demand, *, share: float, ranks: int) -> int:
    """Requests in flight on one rank of a closed loop."""
    if demand.concurrency is None:
        return 1
    return max(1, -(-int(demand.concurrency * share) // ranks))


def _to_client_result(
    served: Served, group: InstanceGroup, *, demand: Demand, goal: ServeGoal, share: float
) -> SimulationResult:
    comes_per_s = share * demand.rate_per_s
    rate = reached_rate(served, ranks=group.ranks, goal=goal, comes_per_s=comes_per_s)
    return to_simulation_result(
        client_observed_ttft_s(served, client=engine_client(group.option.iteration)),
        served.tpot_s_R,
        goal=goal,
        rate=rate,
        tokens=rate * float(served.output_R.mean()),
    )
