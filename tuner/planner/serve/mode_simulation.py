"""Plays the traffic where phases share devices, or where long prompts are read on another pool.

Shared devices: one instance is played, as tuner/simulate/serving/shared.py has it, and speaks for
the others of its group.

Offloaded prompts: the remote side is read first come first served, every rank by itself; nothing of
the local side delays it, so it is played first. Then the local ranks see short prompts when they
come and long ones when their caches do. In a closed loop, where the ends of answers send the next
requests, long ones come later by what the remote side takes: those of the first burst queue there
together, later ones wait by Allen and Cunneen's form (tuner/costs/serving/queueing.py).

Letters: R requests.
"""

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tuner.costs.kv_transfer import whole_s
from tuner.costs.serving.queueing import mean_wait_s
from tuner.planner.serve.demand import Demand
from tuner.planner.serve.kv_transfers import HandOvers
from tuner.planner.serve.multiplexing import halves_of
from tuner.planner.serve.remote_prefill import Cut
from tuner.planner.serve.routed_simulation import played_routed, policy_of
from tuner.planner.serve.routers import ROUTED, RouterChoice
from tuner.planner.serve.simulation import (
    MOST_REQUESTS,
    Floats,
    Group,
    Played,
    joined,
    per_rank,
    played_apart,
    played_of,
    played_together,
    prompt_times,
    served_by,
    thinned,
    times_of,
)
from tuner.serve_plan import Role
from tuner.simulate.serving.client import ROUNDS, client_of, seen_ttft_s
from tuner.simulate.serving.load import Requests, Served
from tuner.simulate.serving.shared import Phases, simulate_shared
from tuner.spec.serving.goal import Mode, ServeGoal
from tuner.spec.serving.routers import RouterPolicy

Flags = npt.NDArray[np.bool_]


def played_in(
    mode: Mode,
    groups: Sequence[Group],
    *,
    router: RouterChoice,
    cut: Cut | None,
    hand_overs: HandOvers,
    goal: ServeGoal,
    demand: Demand,
) -> Played:
    """Play instances of any mode that a program answers.

    Args:
        mode: of them.
        groups: equal instances each.
        router: how requests are spread over them.
        cut: where long prompts are read on another pool.
        hand_overs: what moving a cache takes.
        goal: with targets and traffic.
        demand: the traffic in numbers.
    """
    if is_routed(mode, groups, router):
        return played_routed(groups, router=router, hand_overs=hand_overs, goal=goal, demand=demand)
    if mode == "aggregated":
        return played_together(groups, goal=goal, demand=demand)
    if mode == "shared_device":
        return played_shared(groups, goal=goal, demand=demand)
    prefill = _fused([group for group in groups if group.option.role is Role.PREFILL])
    others = _fused([group for group in groups if group.option.role is not Role.PREFILL])
    if cut is not None:
        return played_offloaded(
            prefill, others, cut, hand_overs=hand_overs, goal=goal, demand=demand
        )
    return played_apart(prefill, others, hand_overs=hand_overs, goal=goal, demand=demand)


def is_routed(mode: Mode, groups: Sequence[Group], router: RouterChoice) -> bool:
    """Say whether instances must be simulated together.

    One instance of a role leaves a router no choice, and of one kind that is served in turn a
    single rank speaks for all.
    """
    if mode not in ROUTED:
        return False
    own = [group for group in groups if group.option.role is not Role.PREFILL]
    if mode == "disaggregated":
        return sum(group.count for group in groups) > 2
    if sum(group.count for group in own) == 1:
        return False
    return len(own) > 1 or policy_of(router, groups) is not RouterPolicy.ROUND_ROBIN


def _fused(groups: Sequence[Group]) -> Group:
    """Stand the slowest kind for all of a role, as many of them as serve what all do."""
    slowest = min(groups, key=lambda group: group.option.rate_per_s / group.option.devices)
    rate = sum(group.rate_per_s for group in groups)
    return Group(option=slowest.option, count=max(1, int(rate / slowest.option.rate_per_s)))


def played_shared(groups: Sequence[Group], *, goal: ServeGoal, demand: Demand) -> Played:
    """Play instances whose devices are shared."""
    total = sum(group.rate_per_s for group in groups)
    shares = [group.rate_per_s / total for group in groups]
    parts = [
        _one_shared(group, share=share, goal=goal, demand=demand)
        for group, share in zip(groups, shares, strict=True)
    ]
    return joined(parts, goal=goal, weights=shares)


def _one_shared(group: Group, *, share: float, goal: ServeGoal, demand: Demand) -> Played:
    option, ranks = group.option, group.ranks
    if option.prefill_share_ratio is None:
        raise ValueError("a shared instance states its share")
    concurrency = _each(demand, share=share, ranks=ranks)
    requests = thinned(
        goal,
        demand,
        count=ROUNDS * concurrency if demand.concurrency is not None else per_rank(goal),
        every=max(1, round(ranks / share)),
        most_tokens=option.kv_tokens,
    )
    reading, writing = halves_of(
        option.iteration, option.prefill_share_ratio, demand, step_tokens=option.step_tokens
    )
    most = max(option.step_tokens, int(requests.input_R.max()))
    alone, beside = (
        times_of(
            replace(option, iteration=one),
            requests,
            most_tokens=most,
            most_running=option.running,
        )
        for one in (option.iteration, writing)
    )
    served = simulate_shared(
        requests,
        phases=Phases(
            prompts_alone=alone,
            prompts_beside=times_of(
                replace(option, iteration=reading), requests, most_tokens=most, most_running=2
            ),
            steps_alone=alone,
            steps_beside=beside,
            step_tokens=option.step_tokens,
            kv_tokens=option.kv_tokens,
            most_running=option.running,
        ),
        concurrency=concurrency,
    )
    return _seen(served, group, demand=demand, goal=goal, share=share)


def played_offloaded(
    remote: Group,
    local: Group,
    cut: Cut,
    *,
    hand_overs: HandOvers,
    goal: ServeGoal,
    demand: Demand,
) -> Played:
    """Play a remote side for long prompts and local instances for all the rest."""
    ranks = local.ranks
    concurrency = _each(demand, share=1.0, ranks=ranks)
    is_closed = demand.concurrency is not None
    count = ROUNDS * concurrency if is_closed else min(MOST_REQUESTS, ranks * per_rank(goal))
    requests = thinned(goal, demand, count=count, every=1, most_tokens=local.option.kv_tokens)
    computed_R = (
        requests.input_R if requests.cached_R is None else requests.input_R - requests.cached_R
    )
    long_R = computed_R > cut.above_tokens
    read_s_R, sent_s_R = _remote_s(remote, local, requests, hand_overs=hand_overs, demand=demand)
    late_s_R = np.where(long_R, read_s_R + sent_s_R, 0.0)
    if requests.arrival_s_R is None:
        late_s_R[long_R] += _wait_s(remote, read_s_R[long_R], cut, demand)
        late_s_R[:concurrency] = np.where(
            long_R[:concurrency],
            (read_s_R + sent_s_R)[:concurrency]
            + _burst_s(remote, read_s_R[:concurrency], long_R[:concurrency], ranks=ranks),
            0.0,
        )
        delay_s_R = late_s_R if requests.delay_s_R is None else requests.delay_s_R + late_s_R
        own = replace(requests, delay_s_R=delay_s_R, read_R=long_R)
    else:
        late_s_R[long_R] += waits_s(requests.arrival_s_R[long_R], read_s_R[long_R], remote.ranks)
        own, late_s_R = _of_one_rank(requests, late_s_R, long_R, ranks=ranks)
    option = local.option
    running = min(option.running, concurrency) if is_closed else option.running
    served = served_by(option, own, most_running=running, concurrency=concurrency)
    sent = replace(served, arrival_s_R=served.arrival_s_R - late_s_R)
    return _seen(sent, local, demand=demand, goal=goal, share=1.0)


def _remote_s(
    remote: Group, local: Group, requests: Requests, *, hand_overs: HandOvers, demand: Demand
) -> tuple[Floats, Floats]:
    """Seconds of each prompt on the remote side, and those of its way to the local one."""
    prompt_s = prompt_times(remote.option, demand, requests)
    path = hand_overs.path(remote.option, local.option)
    each = hand_overs.moved(remote.option, local.option).busiest / hand_overs.tokens
    busy = remote.option.degrees.attention_data
    tokens_U, place_R = np.unique(requests.input_R, return_inverse=True)
    read_s_U = np.array([prompt_s(int(tokens), busy) for tokens in tokens_U])
    sent_s_U = np.array([whole_s(each * int(tokens), path=path) for tokens in tokens_U])
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


def _burst_s(remote: Group, read_s_R: Floats, long_R: Flags, *, ranks: int) -> Floats:
    """Wait of one rank's first requests, where as many of every other rank come at once."""
    every_s = np.repeat(np.where(long_R, read_s_R, 0.0), ranks)
    return waits_s(np.zeros(len(every_s)), every_s, remote.ranks)[::ranks]


def _wait_s(remote: Group, seconds_R: Floats, cut: Cut, demand: Demand) -> float:
    """Mean wait for the remote side at the rate that the targets ask for.

    No longer than behind all long prompts of the loop at once.
    """
    if not len(seconds_R):
        return 0.0
    mean_s = float(seconds_R.mean())
    waits_s = mean_wait_s(
        rate_per_s=demand.rate_per_s * cut.long_share,
        service_s=mean_s,
        servers=remote.ranks,
        service_cv2=float(seconds_R.var()) / mean_s**2,
    )
    under_way = (demand.concurrency or 0) * cut.long_share
    return min(waits_s, under_way * mean_s / remote.ranks)


def _of_one_rank(
    requests: Requests, late_s_R: Floats, long_R: Flags, *, ranks: int
) -> tuple[Requests, Floats]:
    """What one of so many local ranks gets, in the order in which it comes there."""
    if requests.arrival_s_R is None:
        raise ValueError("open arrivals are needed")
    there_s_R = requests.arrival_s_R + late_s_R
    own = np.argsort(there_s_R, kind="stable")[::ranks]
    part = Requests(
        input_R=requests.input_R[own],
        output_R=requests.output_R[own],
        arrival_s_R=there_s_R[own],
        cached_R=None if requests.cached_R is None else requests.cached_R[own],
        read_R=long_R[own],
    )
    return part, late_s_R[own]


def _each(demand: Demand, *, share: float, ranks: int) -> int:
    """Requests under way on one rank of a closed loop."""
    if demand.concurrency is None:
        return 1
    return max(1, -(-int(demand.concurrency * share) // ranks))


def _seen(served: Served, group: Group, *, demand: Demand, goal: ServeGoal, share: float) -> Played:
    rate = share * demand.rate_per_s
    if demand.concurrency is not None:
        span_s = float(served.end_s_R.max() - served.arrival_s_R.min())
        rate = group.ranks * len(served.end_s_R) / max(span_s, 1e-9)
    return played_of(
        seen_ttft_s(served, client=client_of(group.option.iteration.engine)),
        served.tpot_s_R,
        goal=goal,
        rate=rate,
        tokens=rate * float(served.output_R.mean()),
    )
