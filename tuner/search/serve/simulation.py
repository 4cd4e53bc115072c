"""Simulates the traffic on chosen instances and returns the latencies: what all modes share.

Requests go to instances of a group round robin, in proportion to the capacity of each group; where
a closed loop takes sessions of a trace, a rank gets whole ones, their turns in order. Engines fill
their steps, and clients see tokens, by the rules of tuner/simulate/serving/client.py, which the
backtest uses too.

Lengths are drawn once from every quantile of their laws and shuffled, so that few requests have the
mean and the tail of many.

Letters: R requests.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.config.serve import Role
from tuner.costs.serve.residual import ServeResidual
from tuner.plans.serve import Latency
from tuner.search.serve.demand import Demand
from tuner.search.serve.options import Option
from tuner.simulate.serving.client import (
    DELAY_S,
    ROUNDS,
    client_observed_ttft_s,
    engine_client,
    engine_rules,
    prefill_step_seconds,
    waiting_ranks,
)
from tuner.simulate.serving.load import Requests, Served
from tuner.simulate.serving.lockstep import simulate_ranks
from tuner.simulate.serving.steps import StepTimes, step_times
from tuner.spec.serving.goal import Percentiles, ServeGoal, Slo
from tuner.spec.serving.lengths import LengthKind, LengthLaw, quantile_tokens
from tuner.spec.serving.requests import sample_requests

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PER_RANK: Final = (200, 700, 2500)
"""Requests that a rank serves in an open load, by how long its queue takes to settle: few sizes, so
that simulations at similar rates draw the same requests. A closed loop simulates ten rounds."""
RELAXATIONS: Final = 3.0
"""Relaxation times of its queue that a rank is simulated for, up to the last size: exp(-3), 5 %, of
an empty start is left after them."""
MOST_REQUESTS: Final = 20_000
"""Requests of all ranks in one simulation."""
MOST_SPREAD: Final = 5000
"""Requests whose lengths are spread over quantiles; more hold the tail by themselves."""
SEED: Final = 20_251


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGroup:
    """Equal instances."""

    option: Option
    count: int
    island: str = ""
    """Behind whose router; empty where there is one."""
    is_packed: bool = False
    """Instances of an island share its machines (cells.py)."""

    @property
    def ranks(self) -> int:
        """Count the attention-data ranks of all instances of the group."""
        return self.count * self.option.degrees.attention_data

    @property
    def rate_per_s(self) -> float:
        """Return the requests a second of all instances of the group."""
        return self.count * self.option.rate_per_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulationResult:
    """Latencies and rates of the simulated requests."""

    ttft_s_R: Floats
    tpot_s_R: Floats
    requests_per_s: float
    """Served in the long run: all that come, where arrivals are open and capacity suffices."""
    output_tokens_per_s: float
    met_ratio: float
    """Share of requests inside every target that is stated for a percentile."""

    def missed(self, slo: Slo) -> tuple[str, ...]:
        """Targets that do not hold, by name, e.g. `ttft p90`."""
        return tuple(name for name, _, _ in self.misses(slo))

    def misses(self, slo: Slo) -> tuple[tuple[str, float, float], ...]:
        """Targets that do not hold, by name, with the seconds taken and those allowed."""
        return tuple(
            (f"{name} {kind}", seconds, limit)
            for name, targets, values in (
                ("ttft", slo.ttft, self.ttft_s_R),
                ("tpot", slo.tpot, self.tpot_s_R),
            )
            for kind, limit in _stated_limits(targets)
            if len(values) and (seconds := _statistic(values, kind)) > limit
        )


def reading_groups(groups: Sequence[InstanceGroup]) -> list[InstanceGroup]:
    """Return the aggregated instances, or else those that prefill."""
    reading = [group for group in groups if group.option.role is not Role.DECODE]
    return [group for group in reading if group.option.role is Role.AGGREGATED] or reading


def busy_ratio(groups: Sequence[InstanceGroup], *, rate_per_s: float) -> float:
    """Return requests a second over what instances could serve, of the role that is busiest."""
    capacity = defaultdict[Role, float](float)
    for group in groups:
        capacity[group.option.role] += group.rate_per_s
    return rate_per_s / max(min(capacity.values()), 1e-12)


def per_rank(goal: ServeGoal, demand: Demand, *, ranks: float, busy_ratio: float) -> int:
    """Return the requests that each of so many ranks serves in an open simulation, at least.

    Near saturation queues grow for long before they show: an M/M/1 queue that is busy for a share
    b of the time relaxes within b / (1 - sqrt(b))^2 arrivals (Morse, Queues, Inventories and
    Maintenance, 1958).

    Args:
        goal: with its traffic.
        demand: the same in numbers.
        ranks: share the requests, where their number is stated.
        busy_ratio: requests a second over what the ranks could serve.
    """
    if goal.traffic.requests is not None:
        return max(1, round(goal.traffic.requests / ranks))
    idle = max(1.0 - math.sqrt(busy_ratio), 1e-3)
    needed = 0.0 if demand.is_sampled else RELAXATIONS * busy_ratio / idle**2
    return next((size for size in PER_RANK if size >= needed), PER_RANK[-1])


def loop_requests(goal: ServeGoal, *, concurrency: int) -> int:
    """Return the requests of a closed loop, or of the part of it with so many in flight."""
    stated, whole = goal.traffic.requests, goal.traffic.concurrency
    if stated is None or whole is None:
        return ROUNDS * concurrency
    return max(1, round(stated * concurrency / whole))


def reached_rate(served: Served, *, ranks: int, goal: ServeGoal, comes_per_s: float) -> float:
    """Return requests per second: from the first arrival to the last end, unless all that come.

    Args:
        served: by one of so many equal parts.
        ranks: equal parts.
        goal: with its traffic.
        comes_per_s: requests of an open load that goes on.
    """
    if not goal.traffic.sets_its_rate:
        return comes_per_s
    span_s = float(served.end_s_R.max() - served.arrival_s_R.min())
    return ranks * len(served.end_s_R) / max(span_s, 1e-9)


def latency_of(values: Floats) -> Latency:
    """Summarise a time over requests."""
    if not len(values):
        return Latency(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
    return Latency(**{kind: _statistic(values, kind) for kind in ("mean", "p50", "p90", "p99")})


def simulate_by_share(
    groups: Sequence[InstanceGroup],
    simulate: Callable[[InstanceGroup, float], SimulationResult],
    *,
    goal: ServeGoal,
) -> SimulationResult:
    """Simulate every group with its share of the requests, by its capacity, and mix the results."""
    total = sum(group.rate_per_s for group in groups)
    shares = [group.rate_per_s / total for group in groups]
    return mix_results(list(map(simulate, groups, shares)), goal=goal, weights=shares)


def merge_into_slowest(groups: Sequence[InstanceGroup]) -> tuple[InstanceGroup, InstanceGroup]:
    """Let the slowest kind stand for all that prefill, and for all others, at the same rate."""
    prefill, others = (
        [group for group in groups if (group.option.role is Role.PREFILL) == is_prefill]
        for is_prefill in (True, False)
    )
    return _slowest(prefill), _slowest(others)


def _slowest(groups: Sequence[InstanceGroup]) -> InstanceGroup:
    slowest = min(groups, key=lambda group: group.option.rate_per_s / group.option.devices)
    rate = sum(group.rate_per_s for group in groups)
    return InstanceGroup(option=slowest.option, count=max(1, int(rate / slowest.option.rate_per_s)))


def rank_concurrency(demand: Demand, *, share: float, ranks: int) -> int:
    """Requests in flight on one rank of a closed loop."""
    if demand.concurrency is None:
        return 1
    return max(1, -(-int(demand.concurrency * share) // ranks))


def simulate_rank(
    option: Option, requests: Requests, *, most_running: int, concurrency: int
) -> Served:
    """Simulate requests on one rank that both prefills and decodes, beside those it waits for."""
    times = option_step_times(
        option,
        requests,
        most_tokens=option.step_tokens + most_running,
        most_running=most_running,
    )
    rules = engine_rules(
        option.iteration.traits,
        step_tokens=option.step_tokens,
        kv_tokens=option.kv_tokens,
        most_running=most_running,
        is_chunked=option.is_chunked,
    )
    ranks = waiting_ranks(option.iteration)
    return simulate_ranks(requests, times=times, rules=rules, ranks=ranks, concurrency=concurrency)


def prompt_times(
    option: Option, requests: Requests, *computed_ratios: float
) -> list[Callable[[int, int], float]]:
    """Return the seconds of a prefill step by its longest prompt and its busy ranks.

    Args:
        option: that prefills.
        requests: all that come.
        computed_ratios: of a prompt, one for each function; the rest is found in the prefix cache.
    """
    longest = int(requests.input_R.max())
    most_tokens, ranks = min(option.step_tokens, longest), option.degrees.attention_data
    all_busy, *rest = (
        step_times(iteration, most_tokens=most_tokens, most_sequences=2, longest=longest)
        # No other rank may be idle where there is one.
        for iteration in (option.iteration, replace(option.iteration, busy_ratio=0.0))[:ranks]
    )
    return [
        prefill_step_seconds(
            all_busy,
            rest[0] if rest else all_busy,
            ranks=ranks,
            step_tokens=most_tokens,
            computed_ratio=computed_ratio,
        )
        for computed_ratio in computed_ratios
    ]


def sample_rank_requests(
    goal: ServeGoal, demand: Demand, *, count: int, every: int, most_tokens: float
) -> Requests:
    """Draw the requests of one rank of several.

    Args:
        goal: with its traffic.
        demand: the same in numbers.
        count: of the rank.
        every: ranks that share the traffic.
        most_tokens: that one of them has room for, which no request exceeds.
    """
    rng = np.random.default_rng(SEED)
    limit_tokens = int(min(demand.most_tokens, most_tokens))
    is_closed = demand.concurrency is not None
    whole = min(MOST_REQUESTS * 50, count * every)
    drawn = sample_requests(goal.traffic, count=count if is_closed else whole, rng=rng)
    own_R = np.arange(0, len(drawn.input_tokens_N), 1 if is_closed else every)
    after_R = None
    if drawn.after_N is not None and whole > count:
        # Sessions are taken whole, and those of all ranks are needed to leave so many of one.
        drawn = sample_requests(goal.traffic, count=whole, rng=rng)
    if drawn.after_N is not None:
        own_R = own_sessions(drawn.after_N, every=every)[:count]
        after_R = np.searchsorted(own_R, drawn.after_N[own_R])
        after_R[drawn.after_N[own_R] < 0] = -1
    inputs, outputs = clip_lengths(
        *_spread(goal, drawn.input_tokens_N[own_R], drawn.output_tokens_N[own_R], rng=rng),
        most_tokens=limit_tokens,
    )
    found_ratio = (1.0 - demand.computed_ratio) / demand.request_ratio
    cached = np.rint(inputs * found_ratio)
    if demand.request_ratio < 1.0:
        cached[rng.random(len(inputs)) >= demand.request_ratio] = 0.0
    if demand.cached_N is not None and (goal.traffic.is_replayed or drawn.after_N is not None):
        known = own_R < len(demand.cached_N)
        cached[known] = demand.cached_N[own_R[known]]
    return Requests(
        input_R=inputs,
        output_R=outputs,
        arrival_s_R=None if drawn.arrival_s_N is None else drawn.arrival_s_N[own_R],
        delay_s_R=rng.exponential(DELAY_S, len(inputs)) if is_closed else None,
        cached_R=np.minimum(cached, inputs - 1).astype(np.int64) if cached.any() else None,
        after_R=after_R,
    )


def own_sessions(after_N: Ints, *, every: int) -> Ints:
    """Return the requests of every so-manyth session, in order.

    Args:
        after_N: the request that each is the next turn of, -1: of none.
        every: ranks that share the sessions, each of which stays on one.
    """
    session = np.empty_like(after_N)
    begun = 0
    for request, before in enumerate(after_N.tolist()):
        session[request] = begun if before < 0 else session[before]
        begun += before < 0
    return np.flatnonzero(session % every == 0)


def _spread(
    goal: ServeGoal, inputs: Ints, outputs: Ints, *, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """Replace what was drawn from a law by its quantiles, shuffled; pairs of a trace stay."""
    traffic = goal.traffic
    return _quantiles(traffic.input_tokens, inputs, rng=rng), _quantiles(
        traffic.output_tokens, outputs, rng=rng
    )


def _quantiles(law: LengthLaw | None, drawn: Ints, *, rng: np.random.Generator) -> Ints:
    if law is None or law.kind is LengthKind.EMPIRICAL or len(drawn) > MOST_SPREAD:
        return drawn
    return rng.permutation(_every_quantile(law, len(drawn)))


@lru_cache(maxsize=64)
def _every_quantile(law: LengthLaw, count: int) -> Ints:
    values = [quantile_tokens(law, ratio=(place + 0.5) / count) for place in range(count)]
    return np.maximum(np.rint(values), 1).astype(np.int64)


def clip_lengths(inputs: Ints, outputs: Ints, *, most_tokens: int) -> tuple[Ints, Ints]:
    """Clip lengths to what a rank takes."""
    whole = np.clip(inputs, 1, most_tokens - 1)
    return whole, np.clip(outputs, 1, most_tokens - whole)


def option_step_times(
    option: Option, requests: Requests, *, most_tokens: int, most_running: int
) -> StepTimes:
    """Lay out the seconds of an option's steps for requests."""
    return step_times(
        option.iteration,
        most_tokens=most_tokens,
        most_sequences=max(most_running, 2),
        longest=int(requests.input_R.max() + requests.output_R.max()) + 1,
    )


def client_result(
    served: Served,
    group: InstanceGroup,
    *,
    goal: ServeGoal,
    demand: Demand,
    share: float = 1.0,
    parts: int | None = None,
) -> SimulationResult:
    """Return what clients see of instances that decode.

    Args:
        served: by one of so many equal parts.
        group: that decodes.
        goal: with targets and traffic.
        demand: the traffic in numbers.
        share: of the requests that the group gets.
        parts: equal parts; None: as many as the group has ranks.
    """
    rate = reached_rate(
        served, ranks=parts or group.ranks, goal=goal, comes_per_s=share * demand.rate_per_s
    )
    return to_simulation_result(
        client_observed_ttft_s(served, client=engine_client(group.option.iteration)),
        served.tpot_s_R,
        goal=goal,
        rate=rate,
        tokens=rate * float(served.output_R.mean()),
    )


def to_simulation_result(
    ttft_s_R: Floats, tpot_s_R: Floats, *, goal: ServeGoal, rate: float, tokens: float
) -> SimulationResult:
    """Summarise served requests."""
    met = np.ones(len(ttft_s_R), dtype=bool)
    limits = [limit for _, limit in _stated_limits(goal.slo.ttft)]
    if limits:
        met &= ttft_s_R <= max(limits)
    slow = [limit for _, limit in _stated_limits(goal.slo.tpot)]
    tpot_met = float((tpot_s_R <= max(slow)).mean()) if slow and len(tpot_s_R) else 1.0
    return SimulationResult(
        ttft_s_R=ttft_s_R,
        tpot_s_R=tpot_s_R,
        requests_per_s=rate,
        output_tokens_per_s=tokens,
        met_ratio=float(met.mean()) * tpot_met,
    )


def residual_of(groups: Sequence[InstanceGroup]) -> ServeResidual | None:
    """Return what launches said of the engine; all pools of a plan have the same, or none."""
    return groups[0].option.serving_pool.residual


def corrected_result(
    simulated: SimulationResult, groups: Sequence[InstanceGroup], *, goal: ServeGoal
) -> SimulationResult:
    """Correct latencies by what launches of the engine on these devices showed."""
    residual = residual_of(groups)
    if residual is None:
        return simulated
    ttft_s_R = simulated.ttft_s_R * residual.ttft.factor
    tpot_s_R = simulated.tpot_s_R * residual.tpot.factor
    rate, tokens = simulated.requests_per_s, simulated.output_tokens_per_s
    if goal.traffic.concurrency is not None:
        # A closed loop: as many requests run whatever they take (Little's law).
        further = max(tokens / max(rate, 1e-12) - 1.0, 0.0)
        before_s = mean_request_s(simulated.ttft_s_R, simulated.tpot_s_R, further=further)
        scale = before_s / mean_request_s(ttft_s_R, tpot_s_R, further=further)
        rate, tokens = rate * scale, tokens * scale
    return to_simulation_result(ttft_s_R, tpot_s_R, goal=goal, rate=rate, tokens=tokens)


def mean_request_s(ttft_s_R: Floats, tpot_s_R: Floats, *, further: float) -> float:
    """Return the seconds of a mean request with so many tokens after its first."""
    tpot_s = float(tpot_s_R.mean()) if len(tpot_s_R) else 0.0
    return max(float(ttft_s_R.mean()) + further * tpot_s, 1e-12)


def mix_results(
    parts: Sequence[SimulationResult], *, goal: ServeGoal, weights: Sequence[float]
) -> SimulationResult:
    """Mix groups by the share of requests that each serves."""
    if len(parts) == 1:
        return parts[0]
    most_requests = max(len(part.ttft_s_R) for part in parts)
    ttft, tpot = [], []
    for part, weight in zip(parts, weights, strict=True):
        number = max(1, round(most_requests * weight))
        at = (np.arange(number) + 0.5) / number
        ttft.append(np.quantile(part.ttft_s_R, at))
        tpot.append(np.quantile(part.tpot_s_R, at) if len(part.tpot_s_R) else np.zeros(0))
    return to_simulation_result(
        np.concatenate(ttft),
        np.concatenate(tpot),
        goal=goal,
        rate=sum(part.requests_per_s for part in parts),
        tokens=sum(part.output_tokens_per_s for part in parts),
    )


def _stated_limits(targets: Percentiles) -> list[tuple[str, float]]:
    return [
        (kind, limit)
        for kind in ("mean", "p50", "p90", "p99")
        if (limit := getattr(targets, kind)) is not None
    ]


def _statistic(values: Floats, kind: str) -> float:
    if kind == "mean":
        return float(values.mean())
    return float(np.quantile(values, int(kind[1:]) / 100.0))
