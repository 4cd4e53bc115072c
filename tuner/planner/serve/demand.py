"""What the traffic asks for: requests a second, mean lengths, and the lengths to keep room for.

In a closed loop of C requests the rate follows from their latency (Little's law): to keep every
request within its targets, a deployment must serve at least C / (TTFT + O TPOT) requests a second.
"""

from dataclasses import dataclass

import numpy as np

from tuner.spec.serving.goal import Percentiles, ServeGoal
from tuner.spec.serving.lengths import LengthLaw, mean_tokens, quantile_tokens
from tuner.spec.serving.trace_summary import summarise_trace

ROOM_RATIO = 0.99
"""Share of requests whose lengths memory is planned for."""
NO_TARGET_TPOT_S = 0.1
NO_TARGET_TTFT_S = 10.0
"""Where a closed loop has no targets: as slow as people still read along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The traffic in numbers."""

    rate_per_s: float
    """That must be served."""
    input_tokens: float
    """Of a mean prompt, what is found in the prefix cache included."""
    output_tokens: float
    computed_tokens: float
    """Of a mean prompt that must be computed."""
    longest_input: int
    longest_output: int
    """Of all but one request in a hundred."""
    ttft_s: float
    tpot_s: float
    """The strictest targets, as means that a plan is priced against; infinite without one."""
    concurrency: int | None
    """Of a closed loop."""


def demand_of(goal: ServeGoal, *, longest: int) -> Demand:
    """Read the traffic of a goal.

    Args:
        goal: with its traffic and targets.
        longest: tokens of one request at most.

    Raises:
        SpecError: the trace cannot be used.
    """
    traffic = goal.traffic
    if traffic.trace is not None:
        summary = summarise_trace(traffic.trace, rng=np.random.default_rng(0))
        inputs, outputs = summary.sample_input_N, summary.sample_output_N
        means = float(np.mean(inputs)), float(np.mean(outputs))
        tails = (int(np.quantile(inputs, ROOM_RATIO)), int(np.quantile(outputs, ROOM_RATIO)))
        rate = traffic.rate or summary.rate_per_s
    else:
        laws = _laws(goal)
        means = mean_tokens(laws[0]), mean_tokens(laws[1])
        tails = (
            int(quantile_tokens(laws[0], ratio=ROOM_RATIO)),
            int(quantile_tokens(laws[1], ratio=ROOM_RATIO)),
        )
        rate = traffic.rate or 0.0
    ttft_s, tpot_s = strictest_s(goal.slo.ttft), strictest_s(goal.slo.tpot)
    if traffic.concurrency is not None:
        slowest = min(ttft_s, NO_TARGET_TTFT_S) + means[1] * min(tpot_s, NO_TARGET_TPOT_S)
        rate = traffic.concurrency / slowest
    longest_input = min(tails[0], longest - 1)
    return Demand(
        rate_per_s=rate,
        input_tokens=means[0],
        output_tokens=means[1],
        computed_tokens=max(means[0] * (1.0 - traffic.prefix_hit), 1.0),
        longest_input=longest_input,
        longest_output=max(min(tails[1], longest - longest_input), 1),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        concurrency=traffic.concurrency,
    )


def strictest_s(targets: Percentiles) -> float:
    """Return the least time that any percentile is held to; infinite without a target."""
    stated = (targets.mean, targets.p50, targets.p90, targets.p99)
    return min((one for one in stated if one is not None), default=float("inf"))


def _laws(goal: ServeGoal) -> tuple[LengthLaw, LengthLaw]:
    own = goal.traffic
    if own.input_tokens is None or own.output_tokens is None:
        raise ValueError("traffic without a trace has laws of lengths")
    return own.input_tokens, own.output_tokens
