"""Requests of a traffic, sampled or replayed: arrival times, input and output lengths.

The generator is an argument, so equal seeds give equal requests. An open load begins at time 0 with
its first gap. On/off arrivals start in the stationary state; arrivals are drawn on a clock that
runs only while on, and off periods are then inserted.

Letter: N requests.
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tuner.errors import SpecError
from tuner.spec.files import shown_path
from tuner.spec.serving.lengths import LengthLaw, sample_tokens
from tuner.spec.serving.trace_summary import TraceSummary, summarise_trace
from tuner.spec.serving.traces import trace_chunks
from tuner.spec.serving.traffic import Arrival, ArrivalKind, Traffic
from tuner.spec.serving.turns import Sessions

MOST_REQUESTS: Final = 10_000_000
"""Most requests that are kept in memory at once: 240 MB."""
MOST_BLOCKS: Final = 4_000_000
"""Prompt blocks that are read to find sessions; later requests are ignored: 240 MB."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrafficRequests:
    """A list of requests, in order of arrival."""

    arrival_s_N: Floats | None
    """Seconds from the start; None in a closed loop, where completions trigger arrivals."""
    input_tokens_N: Ints
    output_tokens_N: Ints
    after_N: Ints | None = None
    """The request of the previous turn, -1: none; None if no sessions are known."""


def sample_requests(traffic: Traffic, *, count: int, rng: np.random.Generator) -> TrafficRequests:
    """Return `count` requests; fewer if a trace that is used in its order has fewer.

    A closed loop uses a trace with prompt blocks in its order, so that sessions are preserved; of
    another trace it samples pairs of lengths.

    Raises:
        SpecError: the trace cannot be used.
    """
    if not 1 <= count <= MOST_REQUESTS:
        raise ValueError(f"{count} requests are not between 1 and {MOST_REQUESTS}")
    if traffic.is_replayed:
        return _replay(traffic, count=count, rng=rng)
    if traffic.is_closed_loop and traffic.trace is not None:
        in_order = _sessions(traffic.trace, count=count)
        if in_order is not None:
            return in_order
    input_N, output_N = _lengths(traffic, count=count, rng=rng)
    arrival_s_N = None
    if traffic.rate is not None:
        arrival = traffic.arrival or Arrival()
        arrival_s_N = arrivals_s(arrival, rate_per_s=traffic.rate, count=count, rng=rng)
    return TrafficRequests(
        arrival_s_N=arrival_s_N, input_tokens_N=input_N, output_tokens_N=output_N
    )


def _sessions(path: Path, *, count: int) -> TrafficRequests | None:
    """Return the first requests of a trace with their turns; None if it has no blocks."""
    sessions = Sessions()
    inputs: list[Ints] = []
    outputs: list[Ints] = []
    after: list[int] = []
    named = 0
    for chunk in trace_chunks(path, with_blocks=True):
        if chunk.blocks is None:
            return None
        named += len(chunk.blocks.id_B)
        left = count - len(after)
        inputs.append(chunk.input_tokens_N[:left])
        outputs.append(chunk.output_tokens_N[:left])
        rows = zip(
            islice(chunk.blocks.lists(), left),
            inputs[-1].tolist(),
            outputs[-1].tolist(),
            strict=True,
        )
        after += [
            sessions.add(blocks, input_tokens=tokens, output_tokens=output)
            for blocks, tokens, output in rows
        ]
        if len(after) == count or named >= MOST_BLOCKS:
            break
    if not named:
        return None
    return TrafficRequests(
        arrival_s_N=None,
        input_tokens_N=np.concatenate(inputs),
        output_tokens_N=np.concatenate(outputs),
        after_N=np.array(after, dtype=np.int64),
    )


def arrivals_s(
    arrival: Arrival, *, rate_per_s: float, count: int, rng: np.random.Generator
) -> Floats:
    """Draw the arrival times of an open load, in seconds."""
    if arrival.kind is ArrivalKind.CONSTANT:
        return np.arange(1, count + 1) / rate_per_s
    if arrival.kind is ArrivalKind.GAMMA and arrival.cv is not None:
        squared = arrival.cv**2
        gaps_s_N = rng.gamma(1.0 / squared, squared / rate_per_s, size=count)
        return np.cumsum(gaps_s_N)
    if arrival.kind is ArrivalKind.ON_OFF and arrival.on is not None and arrival.off is not None:
        return _on_off_s(
            on_s=arrival.on, off_s=arrival.off, rate_per_s=rate_per_s, count=count, rng=rng
        )
    return np.cumsum(rng.exponential(1.0 / rate_per_s, size=count))


def _on_off_s(
    *, on_s: float, off_s: float, rate_per_s: float, count: int, rng: np.random.Generator
) -> Floats:
    on_ratio = on_s / (on_s + off_s)
    busy_s_N = np.cumsum(rng.exponential(on_ratio / rate_per_s, size=count))
    phases = 1 + int(busy_s_N[-1] / on_s)
    on_end_s = np.cumsum(rng.exponential(on_s, size=phases))
    while on_end_s[-1] < busy_s_N[-1]:
        on_end_s = np.concatenate(
            (on_end_s, on_end_s[-1] + np.cumsum(rng.exponential(on_s, phases)))
        )
    silences_s = rng.exponential(off_s, size=len(on_end_s))
    begins_off = rng.random() >= on_ratio
    before_s = np.concatenate(([rng.exponential(off_s) if begins_off else 0.0], silences_s))
    silent_s = np.cumsum(before_s)
    return np.asarray(busy_s_N + silent_s[np.searchsorted(on_end_s, busy_s_N)])


def _lengths(traffic: Traffic, *, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    if traffic.trace is not None:
        summary = summarise_trace(traffic.trace, rng=rng)
        drawn_N = rng.integers(0, len(summary.sample_input_N), size=count)
        return summary.sample_input_N[drawn_N], summary.sample_output_N[drawn_N]
    return (
        _sample(traffic.input_tokens, count=count, rng=rng),
        _sample(traffic.output_tokens, count=count, rng=rng),
    )


def _sample(law: LengthLaw | None, *, count: int, rng: np.random.Generator) -> Ints:
    if law is None:
        raise ValueError("traffic without a trace has length distributions")
    return sample_tokens(law, count=count, rng=rng)


def _replay(traffic: Traffic, *, count: int, rng: np.random.Generator) -> TrafficRequests:
    if traffic.trace is None:
        raise ValueError("only a trace can be replayed")
    stretch = 1.0
    if traffic.rate is not None:
        stretch = _stretch_ratio(summarise_trace(traffic.trace, rng=rng), traffic=traffic)
    arrivals, inputs, outputs = [], [], []
    left = count
    for chunk in trace_chunks(traffic.trace):
        arrivals.append(chunk.arrival_s_N[:left] * stretch)
        inputs.append(chunk.input_tokens_N[:left])
        outputs.append(chunk.output_tokens_N[:left])
        left -= len(arrivals[-1])
        if not left:
            break
    return TrafficRequests(
        arrival_s_N=np.concatenate(arrivals),
        input_tokens_N=np.concatenate(inputs),
        output_tokens_N=np.concatenate(outputs),
    )


def _stretch_ratio(summary: TraceSummary, *, traffic: Traffic) -> float:
    """Factor on the trace's times that gives the requested rate."""
    if summary.span_s <= 0.0:
        trace = shown_path(traffic.trace) if traffic.trace else ""
        raise SpecError(f"{trace}: all requests arrive at once, so that no factor gives the rate")
    return summary.rate_per_s / (traffic.rate or summary.rate_per_s)
