"""Plays the traffic against chosen instances and reads off what requests meet.

Requests go to instances of a group in turn, in proportion to what each group can serve; ranks of a
group are alike, so where they are aggregated one is played and speaks for the others. Prefill and
decode apart are played whole.

Letters: R requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.costs.kv_hand_over import whole_s
from tuner.costs.serving.engine import TRAITS, Batching
from tuner.costs.serving.iteration import Iteration
from tuner.planner.serve.demand import Demand
from tuner.planner.serve.handovers import HandOvers
from tuner.planner.serve.options import Option, prompt_seconds
from tuner.serve_plan import Latency
from tuner.simulate.serving.batching import Rules, simulate
from tuner.simulate.serving.disaggregated import Stations, simulate_disaggregated
from tuner.simulate.serving.load import Requests
from tuner.simulate.serving.steps import StepTimes, step_times
from tuner.spec.serving.goal import Percentiles, ServeGoal, Slo
from tuner.spec.serving.requests import requests_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PER_RANK: Final = 200
"""Requests that a rank serves, at least; a closed loop plays ten rounds."""
ROUNDS: Final = 10
MOST_REQUESTS: Final = 20_000
PROMPT_POINTS: Final = 24
SEED: Final = 20_251


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Equal instances."""

    option: Option
    count: int

    @property
    def ranks(self) -> int:
        """Attention-data ranks of all of them."""
        return self.count * self.option.degrees.attention_data

    @property
    def rate_per_s(self) -> float:
        """Of all of them."""
        return self.count * self.option.rate_per_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Played:
    """What requests met."""

    ttft_s_R: Floats
    tpot_s_R: Floats
    requests_per_s: float
    """Served in the long run: all that come, where arrivals are open and capacity suffices."""
    output_tokens_per_s: float
    met_ratio: float
    """Share of requests inside every target that is stated for a percentile."""

    def meets(self, slo: Slo) -> bool:
        """Whether every target holds."""
        return not self.missed(slo)

    def missed(self, slo: Slo) -> tuple[str, ...]:
        """Targets that do not hold, by name, e.g. `ttft p90`."""
        return tuple(
            f"{name} {kind}"
            for name, targets, values in (
                ("ttft", slo.ttft, self.ttft_s_R),
                ("tpot", slo.tpot, self.tpot_s_R),
            )
            for kind, limit in _stated(targets)
            if len(values) and _value(values, kind) > limit
        )


def latency_of(values: Floats) -> Latency:
    """Summarise a time over requests."""
    if not len(values):
        return Latency(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
    return Latency(**{kind: _value(values, kind) for kind in ("mean", "p50", "p90", "p99")})


def played_together(groups: Sequence[Group], *, goal: ServeGoal, demand: Demand) -> Played:
    """Play aggregated instances."""
    total = sum(group.rate_per_s for group in groups)
    parts = []
    for group in groups:
        share = group.rate_per_s / total
        parts.append(_rank_together(group, share=share, goal=goal, demand=demand))
    return _joined(parts, goal=goal, weights=[group.rate_per_s / total for group in groups])


def _rank_together(group: Group, *, share: float, goal: ServeGoal, demand: Demand) -> Played:
    option = group.option
    ranks = group.ranks
    traits = TRAITS[option.iteration.engine]
    concurrency = 1
    if demand.concurrency is not None:
        concurrency = max(1, -(-int(demand.concurrency * share) // ranks))
    count = PER_RANK if demand.concurrency is None else ROUNDS * concurrency
    requests = _thinned(goal, demand, count=count, every=max(1, round(ranks / share)))
    step_tokens = traits.step_tokens
    if traits.batching is Batching.WHOLE:
        step_tokens = max(step_tokens, option.running + int(requests.input_R.max()) + 64)
    most = min(option.running, max(concurrency, 1) if demand.concurrency else option.running)
    times = _times(option, requests, most_tokens=step_tokens + most, most_running=most)
    served = simulate(
        requests,
        times=times,
        rules=Rules(
            batching=traits.batching,
            step_tokens=step_tokens,
            kv_tokens=option.kv_tokens,
            most_running=most,
        ),
        concurrency=concurrency,
    )
    rate = share * demand.rate_per_s
    if demand.concurrency is not None:
        span_s = float(served.end_s_R.max() - served.arrival_s_R.min())
        rate = ranks * len(served.end_s_R) / max(span_s, 1e-9)
    return _played(
        served.ttft_s_R,
        served.tpot_s_R,
        goal=goal,
        rate=rate,
        tokens=rate * float(served.output_R.mean()),
    )


def played_apart(
    prefill: Group, decode: Group, *, hand_overs: HandOvers, goal: ServeGoal, demand: Demand
) -> Played:
    """Play prefill and decode instances.

    Args:
        prefill: groups of one kind.
        decode: the same.
        hand_overs: what moving a cache takes.
        goal: with targets and traffic.
        demand: the traffic in numbers.
    """
    concurrency = demand.concurrency or 0
    count = PER_RANK * max(prefill.ranks, decode.ranks) if not concurrency else ROUNDS * concurrency
    count = min(MOST_REQUESTS, count)
    drawn = requests_of(goal.traffic, count=count, rng=np.random.default_rng(SEED))
    inputs, outputs = _cut(drawn.input_tokens_N, drawn.output_tokens_N, demand, share=1.0)
    requests = Requests(input_R=inputs, output_R=outputs, arrival_s_R=drawn.arrival_s_N)
    served = simulate_disaggregated(
        requests,
        stations=_stations(prefill, decode, hand_overs, demand, requests),
        concurrency=concurrency,
    )
    rate = demand.rate_per_s
    if concurrency:
        span_s = float(served.end_s_R.max() - served.arrival_s_R.min())
        rate = len(served.end_s_R) / max(span_s, 1e-9)
    return _played(
        served.ttft_s_R,
        served.tpot_s_R,
        goal=goal,
        rate=rate,
        tokens=rate * float(served.output_R.mean()),
    )


def _stations(
    prefill: Group, decode: Group, hand_overs: HandOvers, demand: Demand, requests: Requests
) -> Stations:
    reading = prefill.option.iteration
    longest, ranks = int(requests.input_R.max()), reading.degrees.attention_data
    full = _Curve(reading, demand, longest).table
    alone = _Curve(replace(reading, busy_ratio=0.0), demand, longest).table

    def prompt_s(tokens: int, busy: int) -> float:
        # Between a step that one rank has a prompt in and one that all have.
        share = (busy - 1) / (ranks - 1) if ranks > 1 else 1.0
        return alone[tokens] * (1.0 - share) + full[tokens] * share

    path = hand_overs.path(prefill.option, decode.option)
    each = hand_overs.moved(prefill.option, decode.option).busiest / hand_overs.tokens
    return Stations(
        prefill_workers=prefill.count,
        prefill_ranks=ranks,
        prompt_s=prompt_s,
        handover_s=lambda tokens: whole_s(each * tokens, path=path),
        decode_ranks=decode.ranks,
        decode=_times(
            decode.option,
            requests,
            most_tokens=decode.option.running + 1,
            most_running=decode.option.running,
        ),
        kv_tokens=decode.option.kv_tokens,
        most_running=decode.option.running,
    )


class _Curve:
    """Seconds of a prompt by its length, read between priced points."""

    def __init__(self, iteration: Iteration, demand: Demand, longest: int) -> None:
        share = demand.computed_tokens / demand.input_tokens
        self.points = np.unique(np.round(np.geomspace(1.0, max(longest, 2), PROMPT_POINTS)))
        self.seconds = np.array(
            [
                prompt_seconds(
                    iteration,
                    tokens=max(point * share, 1.0),
                    demand=replace(demand, input_tokens=point, computed_tokens=point * share),
                )
                for point in self.points
            ]
        )

    @property
    def table(self) -> list[float]:
        """By tokens, from 0 on; a list, because single entries of arrays are slow to read."""
        every = np.arange(int(self.points[-1]) + 1)
        return [float(value) for value in np.interp(every, self.points, self.seconds)]


def _thinned(goal: ServeGoal, demand: Demand, *, count: int, every: int) -> Requests:
    """Draw what one rank of so many gets."""
    rng = np.random.default_rng(SEED)
    share = demand.computed_tokens / demand.input_tokens
    if demand.concurrency is not None:
        drawn = requests_of(goal.traffic, count=count, rng=rng)
        inputs, outputs = _cut(drawn.input_tokens_N, drawn.output_tokens_N, demand, share=share)
        return Requests(input_R=inputs, output_R=outputs)
    whole = min(MOST_REQUESTS * 50, count * every)
    drawn = requests_of(goal.traffic, count=whole, rng=rng)
    inputs, outputs = _cut(drawn.input_tokens_N, drawn.output_tokens_N, demand, share=share)
    if drawn.arrival_s_N is None:
        raise ValueError("open arrivals are needed")
    return Requests(
        input_R=inputs[::every],
        output_R=outputs[::every],
        arrival_s_R=drawn.arrival_s_N[::every],
    )


def _cut(inputs: Ints, outputs: Ints, demand: Demand, *, share: float) -> tuple[Ints, Ints]:
    """Hold lengths to what memory is planned for; of prompts a share counts."""
    computed = np.maximum(np.rint(np.minimum(inputs, demand.longest_input) * share), 1)
    return computed.astype(np.int64), np.clip(outputs, 1, demand.longest_output)


def _times(option: Option, requests: Requests, *, most_tokens: int, most_running: int) -> StepTimes:
    return step_times(
        option.iteration,
        most_tokens=most_tokens,
        most_sequences=max(most_running, 2),
        longest=int(requests.input_R.max() + requests.output_R.max()) + 1,
    )


def _played(
    ttft_s_R: Floats, tpot_s_R: Floats, *, goal: ServeGoal, rate: float, tokens: float
) -> Played:
    met = np.ones(len(ttft_s_R), dtype=bool)
    limits = [limit for _, limit in _stated(goal.slo.ttft)]
    if limits:
        met &= ttft_s_R <= max(limits)
    slow = [limit for _, limit in _stated(goal.slo.tpot)]
    tpot_met = float((tpot_s_R <= max(slow)).mean()) if slow and len(tpot_s_R) else 1.0
    return Played(
        ttft_s_R=ttft_s_R,
        tpot_s_R=tpot_s_R,
        requests_per_s=rate,
        output_tokens_per_s=tokens,
        met_ratio=float(met.mean()) * tpot_met,
    )


def _joined(parts: Sequence[Played], *, goal: ServeGoal, weights: Sequence[float]) -> Played:
    """Mix groups by the share of requests that each serves."""
    if len(parts) == 1:
        return parts[0]
    most = max(len(part.ttft_s_R) for part in parts)
    ttft, tpot = [], []
    for part, weight in zip(parts, weights, strict=True):
        number = max(1, round(most * weight))
        at = (np.arange(number) + 0.5) / number
        ttft.append(np.quantile(part.ttft_s_R, at))
        tpot.append(np.quantile(part.tpot_s_R, at) if len(part.tpot_s_R) else np.zeros(0))
    return _played(
        np.concatenate(ttft),
        np.concatenate(tpot),
        goal=goal,
        rate=sum(part.requests_per_s for part in parts),
        tokens=sum(part.output_tokens_per_s for part in parts),
    )


def _stated(targets: Percentiles) -> list[tuple[str, float]]:
    return [
        (kind, limit)
        for kind in ("mean", "p50", "p90", "p99")
        if (limit := getattr(targets, kind)) is not None
    ]


def _value(values: Floats, kind: str) -> float:
    if kind == "mean":
        return float(values.mean())
    return float(np.quantile(values, int(kind[1:]) / 100.0))
