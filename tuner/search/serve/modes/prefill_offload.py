"""Long prompts prefilled on another pool: what instances serve at each threshold of lengths.

    L        tokens of a prompt that must be computed, a random number; t a threshold
    p        share of the requests with L > t, which the remote pool prefills
    remote   d / (p E[P(L) | L > t]) requests a second of the whole mix, P seconds of a prompt
    local    prefills the others and decodes all: d n / (O U(n)), where the prompts that come with
             every step are 1 - p as many and E[L | L <= t] long (mixed_batches.py)
    link     p E[bytes | L > t] for each request of the mix

With the rates of the whole mix each threshold is one program of instances, of which the best counts
and the least bound is the bound: the optimum over thresholds of the grid and instances together.

Source: Prefill-as-a-Service (arXiv:2604.15039), equations 3 to 7 and its grid of thresholds; there
short prompts have prefill instances of their own, which no release's router chooses by length.

Remote ranks prefill first come first served, each by itself; nothing on the local side delays them,
so they are simulated first. The local ranks then see short prompts on arrival and long ones when
their KV caches arrive. In a closed loop, where finished requests send the next ones, long ones are
delayed by the remote side: those of the first burst queue there together, later ones wait by Allen
and Cunneen's form (tuner/costs/serve/queueing.py).

Letters: R requests, N prompts or numbers of sequences.

Not covered: a remote pool that also serves whole requests.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.config.serve import Role
from tuner.costs.serve.kv_transfer import whole_s
from tuner.costs.serve.offload import LengthThreshold, split_at
from tuner.costs.serve.queueing import mean_wait_s
from tuner.prices.serve.curves import Floats
from tuner.search.serve.demand import Demand
from tuner.search.serve.kv_transfers import KvTransfers, build_kv_transfers
from tuner.search.serve.mixed_batches import lasting_running, prompt_time, token_seconds
from tuner.search.serve.modes.mode import ServingMode
from tuner.search.serve.options import LONGEST_S, Option, at_fractions, client_ttft_s, most_running
from tuner.search.serve.problem import ModeSolution, ServeProblem
from tuner.search.serve.routers import RouterChoice
from tuner.search.serve.simulation import (
    MOST_REQUESTS,
    InstanceGroup,
    SimulationResult,
    busy_ratio,
    client_result,
    loop_requests,
    merge_into_slowest,
    per_rank,
    prompt_times,
    rank_concurrency,
    sample_rank_requests,
    simulate_rank,
)
from tuner.simulate.serving.load import Requests
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.requests import sample_requests
from tuner.units import format_ratio

Flags = npt.NDArray[np.bool_]
PROMPTS: Final = 4000
"""Prompts that are drawn to know their lengths."""
QUANTILES: Final = (0.25, 0.5, 0.7, 0.85, 0.95)
"""Quantiles of the lengths to compute at which thresholds are tried."""
BATCHES: Final = 16
SEED: Final = 20_252


def _variants(problem: ServeProblem) -> Iterator[ServeProblem]:
    """Yield the problem of each threshold."""
    if len(problem.serving_pools) < 2 or not problem.spec.cluster.links:
        return
    # One threshold is for all instances, so that the fewest hits of any count.
    ranks = max((option.degrees.attention_data for option in problem.options.options), default=1)
    problem = replace(problem, demand=problem.demand.on(Role.AGGREGATED, ranks=ranks))
    for threshold in length_thresholds(problem.spec.goal, problem.demand):
        made = offload_options(problem.options.options, threshold, problem.demand)
        # Flows count requests of the whole mix, of which only long ones move a cache.
        moved = build_kv_transfers(
            problem.spec,
            input_tokens=threshold.long_share * threshold.input_tokens(is_long=True),
            options=made,
        )
        yield replace(
            problem,
            options=replace(problem.options, options=made),
            kv_transfers=replace(moved, between_pools=True),
            threshold=threshold,
        )


def length_thresholds(goal: ServeGoal, demand: Demand) -> tuple[LengthThreshold, ...]:
    """Return the thresholds worth trying; none where all prompts are about as long.

    Raises:
        SpecError: the trace cannot be used.
    """
    drawn = sample_requests(goal.traffic, count=PROMPTS, rng=np.random.default_rng(SEED))
    ratio = demand.computed_ratio
    whole_N = np.minimum(drawn.input_tokens_N, demand.most_tokens - 1)
    tokens_N = np.maximum(np.rint(whole_N * ratio), 1.0)
    thresholds = np.unique(np.floor(np.quantile(tokens_N, QUANTILES)))
    return tuple(
        LengthThreshold(
            above_tokens=int(above),
            split=split_at(above, tokens_N=tokens_N, weight_N=np.ones(len(tokens_N))),
            tokens_N=tokens_N,
            computed_ratio=ratio,
        )
        for above in thresholds
        if tokens_N.min() <= above < tokens_N.max()
    )


def offload_options(
    options: Sequence[Option], threshold: LengthThreshold, demand: Demand
) -> tuple[Option, ...]:
    """Return remote and local instances at a threshold, local ones as decode of the program.

    Args:
        options: prefill and aggregated ones.
        threshold: the threshold.
        demand: of the whole mix.
    """
    remote = (
        instance for option in _fastest(options) for instance in _remote(option, threshold, demand)
    )
    kinds = {
        (option.serving_pool.pool.name, option.degrees, option.step_tokens): option
        for option in options
        if option.role is Role.AGGREGATED
    }
    local = (
        instance for option in kinds.values() for instance in _local(option, threshold, demand)
    )
    return (*remote, *local)


def _fastest(options: Sequence[Option]) -> Iterator[Option]:
    """Yield the prefill option that serves the most, by pool, tensor degree and size."""
    best: dict[object, Option] = {}
    for option in options:
        if option.role is Role.PREFILL:
            key = option.serving_pool.pool.name, option.degrees.attention_tensor, option.devices
            if key not in best or option.rate_per_s > best[key].rate_per_s:
                best[key] = option
    yield from best.values()


def _remote(option: Option, threshold: LengthThreshold, demand: Demand) -> Iterator[Option]:
    times = [
        prompt_time(
            option.iteration,
            replace(demand, input_tokens=tokens / threshold.computed_ratio, computed_tokens=tokens),
            step_tokens=option.step_tokens,
        )
        for tokens in threshold.lengths(is_long=True)
    ]
    busy_s = float(np.mean([prompt.busy_s for prompt in times]))
    read_s = float(np.mean([prompt.latency_s for prompt in times]))
    first_s = client_ttft_s(option.iteration, demand, read_s=read_s)
    if first_s <= demand.ttft_s:
        rate = option.degrees.attention_data / (threshold.long_share * busy_s)
        yield replace(option, rate_per_s=rate, ttft_s=first_s)


def _local(option: Option, threshold: LengthThreshold, demand: Demand) -> Iterator[Option]:
    tokens = threshold.split.short_mean(threshold.tokens_N)
    # As many prompts come with a step as if outputs were longer.
    short = replace(
        demand,
        input_tokens=tokens / threshold.computed_ratio,
        computed_tokens=tokens,
        output_tokens=demand.output_tokens / (1.0 - threshold.long_share),
    )
    read_s = prompt_time(option.iteration, short, step_tokens=option.step_tokens).latency_s
    first_s = client_ttft_s(option.iteration, demand, read_s=read_s)
    if first_s > demand.ttft_s:
        return
    running_N = np.unique(
        np.round(
            np.geomspace(
                1.0, most_running(option.kv_tokens, demand, traits=option.iteration.traits), BATCHES
            )
        )
    ).astype(np.float64)
    tpot_s_N = token_seconds(option.iteration, running_N, short, step_tokens=option.step_tokens)
    lasting = lasting_running(option.iteration, short, step_tokens=option.step_tokens)
    lasting_N = np.minimum(running_N, lasting)
    rate_N = option.degrees.attention_data * lasting_N / (demand.output_tokens * tpot_s_N)
    rate_N = np.where(tpot_s_N <= min(demand.tpot_s, LONGEST_S), rate_N, 0.0)
    yield from at_fractions(option, running_N, rate_N, tpot_s_N, role=Role.DECODE, ttft_s=first_s)


def _simulate(
    problem: ServeProblem, groups: Sequence[InstanceGroup], _router: RouterChoice
) -> SimulationResult:
    goal, demand, threshold = problem.spec.goal, problem.demand, problem.threshold
    if threshold is None:
        raise ValueError("long prompts are those above a threshold")
    remote, local = merge_into_slowest(groups)
    ranks = local.ranks
    concurrency = rank_concurrency(demand, share=1.0, ranks=ranks)
    is_closed = demand.concurrency is not None
    busy = busy_ratio((local,), rate_per_s=demand.rate_per_s)
    count = (
        loop_requests(goal, concurrency=concurrency)
        if is_closed
        else min(MOST_REQUESTS, ranks * per_rank(goal, demand, ranks=ranks, busy_ratio=busy))
    )
    requests = sample_rank_requests(
        goal, demand, count=count, every=1, most_tokens=local.option.kv_tokens
    )
    computed_R = (
        requests.input_R if requests.cached_R is None else requests.input_R - requests.cached_R
    )
    long_R = computed_R > threshold.above_tokens
    read_s_R, sent_s_R = _remote_s(
        remote, local, requests, kv_transfers=problem.kv_transfers, demand=demand
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
    return client_result(sent, local, goal=goal, demand=demand)


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


def _explain(problem: ServeProblem) -> str:
    """Say why no prompts can be prefilled elsewhere; empty: they can."""
    if len(problem.serving_pools) < 2:
        return "there is no second pool to prefill long prompts"
    if not problem.spec.cluster.links:
        return "no link joins the pools, so that no cache gets from one to another"
    if not length_thresholds(problem.spec.goal, problem.demand):
        return "all prompts are equally long, so that no length separates them"
    return ""


def _words(solution: ModeSolution) -> str:
    threshold = solution.threshold
    if threshold is None:
        return ""
    return (
        f", prompts with more than {threshold.above_tokens} tokens to compute"
        f" ({format_ratio(threshold.long_share, digits=0)}) prefilled remotely"
    )


MODE = ServingMode(
    priced_roles=(Role.PREFILL, Role.AGGREGATED),
    # The program's decode reads short prompts too.
    launched_roles={Role.DECODE: Role.AGGREGATED},
    makes_options=True,
    variants=_variants,
    simulate=_simulate,
    explain=_explain,
    words=_words,
)
