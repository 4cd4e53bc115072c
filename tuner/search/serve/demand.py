"""The traffic in numbers: requests a second, mean lengths, and the lengths to keep room for.

    I, O    tokens of a prompt and of its output, as random numbers

In a closed loop of C requests the rate follows from their latency (Little's law): to keep every
request within its targets, a deployment must serve at least C / (TTFT + E[O] TPOT) requests a
second. Without a target it is sized for people who read along; where the pools do not hold so much,
for what they hold (plan_serve.py). A launch is simulated with C requests in any case.

Sequences that run are not requests as they come: an output of O tokens takes O steps, so that long
ones are sampled in proportion to their length (the inspection paradox; Feller, An Introduction to
Probability Theory and Its Applications, volume 2, I.4):

    held    mean of I + O among those that run    E[O (I + O)] / E[O]
    past    mean of I and half of O among them    E[O (I + O / 2)] / E[O]

For fixed lengths these are I + O and I + O / 2. For outputs with heavy tails, as reasoning models
give (arXiv:2510.18672), they are far above the means, and memory is planned for what many of them
take together except 1 % of the time (occupancy.py).

Not covered: correlated prompt and output lengths, unless a trace has them as pairs.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tuner.config.serve import Role
from tuner.errors import SpecError
from tuner.search.serve.occupancy import grown, joint_quantiles
from tuner.spec.files import shown_path
from tuner.spec.serving.goal import Percentiles, ServeGoal
from tuner.spec.serving.lengths import (
    LengthKind,
    LengthLaw,
    mean_tokens,
    quantile_tokens,
    sample_tokens,
)
from tuner.spec.serving.trace_summary import summarise_trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MOST_RUNNING = 1024
"""Sequences of one rank: what engines' CUDA graphs are captured for at most."""
ROOM_RATIO = 0.99
"""Share of requests whose lengths memory is planned for."""
QUANTILES = 2000
"""Number of quantiles at which a law of lengths is read."""
TAIL_LOG = 16.0
"""Logarithm of how rare the longest quantile is: one in exp(16), nine million."""
NO_TARGET_TPOT_S = 0.1
NO_TARGET_TTFT_S = 10.0
"""Seconds per output token and to the first token that a closed loop without targets is sized for:
as slow as people still read along."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefixHits:
    """Prompt tokens that are found in prefix caches."""

    ratio: float
    """Share of all prompt tokens that is found."""
    cached_N: Ints | None = None
    """Tokens that are found of each recorded prompt, in the order of the trace
    (prefix_reuse.py)."""
    request_ratio: float = 1.0
    """Share of requests that come where their prefix is; the others find nothing."""


def spread_hits(hit: float, *, places: int) -> PrefixHits | None:
    """Return what is left of a session's hits on so many caches of which one has its prefix.

    Requests of a session come to each as often. None: all are left.
    """
    if places == 1:
        return None
    return PrefixHits(ratio=hit / places, request_ratio=1.0 / places)


HitsByRanks = Callable[[Role, int], PrefixHits | None]
"""Returns the hits of an instance by its role and attention-data ranks; None: as stated."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """The traffic in numbers."""

    rate_per_s: float
    """Requests a second that must be served."""
    input_tokens: float
    """Tokens of a mean prompt, those found in the prefix cache included."""
    output_tokens: float
    computed_tokens: float
    """Tokens of a mean prompt that must be computed."""
    longest_input: int
    longest_output: int
    """Tokens of a prompt and of an output that all but one request in a hundred stay within."""
    most_output: int
    """Tokens of the longest output: of a law, one in nine million is longer."""
    most_tokens: int
    """Largest number of tokens of one request, as the model or the goal limits it."""
    held_tokens: float
    """Tokens that a running sequence will have when it ends, mean."""
    past_tokens: float
    """Tokens that a running sequence has at a random time, mean."""
    reserved_N: Floats
    """Tokens that 1, 2, … running sequences will have together when they end, exceeded once in a
    hundred looks: what is set aside where an engine reserves whole outputs."""
    grown_N: Floats
    """Tokens that 1, 2, … running sequences have together at a random time, exceeded once in a
    hundred looks, where an engine takes memory as outputs grow."""
    ttft_s: float
    tpot_s: float
    """The strictest targets, as means that a plan is priced against; infinite without one."""
    concurrency: int | None
    """Concurrent requests of a closed loop; None: an open loop."""
    cached_N: Ints | None = None
    """Tokens of the trace's first prompts that are found in the prefix cache, where it names their
    blocks."""
    request_ratio: float = 1.0
    """Share of requests that find their prefix; the others compute whole prompts."""
    hits_by_ranks: HitsByRanks | None = None
    """Hits of instances, where they depend on how many ranks share the requests."""
    is_sampled: bool = False
    """Whether a simulation of an open load ends after few requests, near saturation too."""

    @property
    def computed_ratio(self) -> float:
        """Share of a mean prompt's tokens that must be computed."""
        return self.computed_tokens / self.input_tokens

    @property
    def most_at_once(self) -> int:
        """Requests that an instance can have: those of a closed loop, else any number."""
        return sys.maxsize if self.concurrency is None else self.concurrency

    def on(self, role: Role, *, ranks: int) -> "Demand":
        """Return the traffic with the prefix hits of instances of so many attention-data ranks."""
        hits = None if self.hits_by_ranks is None else self.hits_by_ranks(role, ranks)
        return self if hits is None else with_hits(self, hits)


def build_demand(goal: ServeGoal, *, longest: int) -> Demand:
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
        lengths = inputs.astype(np.float64), outputs.astype(np.float64), np.ones(len(inputs))
        means = float(np.mean(inputs)), float(np.mean(outputs))
        tails = (int(np.quantile(inputs, ROOM_RATIO)), int(np.quantile(outputs, ROOM_RATIO)))
        rate = traffic.rate or summary.rate_per_s
        if not math.isfinite(rate):
            raise SpecError(
                f"{shown_path(traffic.trace)}: all requests come at once, which is no rate; state"
                " 'rate' beside 'trace', with an 'arrival'"
            )
    else:
        laws = _laws(goal)
        lengths = _quantiles(laws)
        means = mean_tokens(laws[0]), mean_tokens(laws[1])
        tails = (
            int(quantile_tokens(laws[0], ratio=ROOM_RATIO)),
            int(quantile_tokens(laws[1], ratio=ROOM_RATIO)),
        )
        rate = traffic.rate or 0.0
    ttft_s, tpot_s = strictest_s(goal.slo.ttft), strictest_s(goal.slo.tpot)
    if lengths[1].max() <= 1.0:
        tpot_s = math.inf  # No token follows the first.
    if traffic.concurrency is not None:
        slowest = min(ttft_s, NO_TARGET_TTFT_S) + means[1] * min(tpot_s, NO_TARGET_TPOT_S)
        rate = traffic.concurrency / slowest
    longest_input = min(tails[0], longest - 1)
    prompt_lengths = np.minimum(lengths[0], longest - 1.0)
    output_lengths = np.clip(lengths[1], 1.0, longest - prompt_lengths)
    weight = lengths[2] * output_lengths / (lengths[2] @ output_lengths)
    return Demand(
        rate_per_s=rate,
        input_tokens=means[0],
        output_tokens=means[1],
        computed_tokens=max(means[0] * (1.0 - traffic.prefix_hit), 1.0),
        longest_input=longest_input,
        longest_output=max(min(tails[1], longest - longest_input), 1),
        most_output=int(output_lengths.max()),
        most_tokens=longest,
        held_tokens=float(weight @ (prompt_lengths + output_lengths)),
        past_tokens=float(weight @ (prompt_lengths + 0.5 * output_lengths)),
        reserved_N=joint_quantiles(
            prompt_lengths + output_lengths, weight, most_sequences=MOST_RUNNING
        ),
        grown_N=joint_quantiles(
            *grown(prompt_lengths, output_lengths, weight), most_sequences=MOST_RUNNING
        ),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        concurrency=traffic.concurrency,
    )


def with_hits(demand: Demand, hits: PrefixHits) -> Demand:
    """Return the traffic with what prefix caches hold of its prompts."""
    return replace(
        demand,
        computed_tokens=max(demand.input_tokens * (1.0 - hits.ratio), 1.0),
        cached_N=hits.cached_N,
        request_ratio=hits.request_ratio,
    )


def _quantiles(laws: tuple[LengthLaw, LengthLaw]) -> tuple[Floats, Floats, Floats]:
    """Prompt lengths, output lengths, and the share of requests that each pair stands for.

    Output lengths are sampled ever finer towards the longest, which run longest: each stands for
    the same share of all that are longer.
    """
    left = np.exp(-TAIL_LOG * np.arange(QUANTILES + 1) / QUANTILES)
    left[-1] = 0.0
    at = 1.0 - np.sqrt(left[:-1] * np.maximum(left[1:], left[-2] / 2.0))
    even = (np.arange(QUANTILES) + 0.5) / QUANTILES
    rng = np.random.default_rng(0)
    prompt_lengths, output_lengths = laws
    inputs = rng.permutation(_at(prompt_lengths, even, rng=rng))
    if output_lengths.kind is LengthKind.EMPIRICAL:
        return inputs, _at(output_lengths, even, rng=rng), np.full(QUANTILES, 1.0 / QUANTILES)
    return inputs, _at(output_lengths, at, rng=rng), left[:-1] - left[1:]


def _at(law: LengthLaw, at: Floats, *, rng: np.random.Generator) -> Floats:
    if law.kind is LengthKind.EMPIRICAL:
        return sample_tokens(law, count=len(at), rng=rng).astype(np.float64)
    return np.array([quantile_tokens(law, ratio=float(ratio)) for ratio in at])


def strictest_s(targets: Percentiles) -> float:
    """Return the least time that any percentile is held to; infinite without a target."""
    stated = (targets.mean, targets.p50, targets.p90, targets.p99)
    return min((limit_s for limit_s in stated if limit_s is not None), default=float("inf"))


def _laws(goal: ServeGoal) -> tuple[LengthLaw, LengthLaw]:
    traffic = goal.traffic
    if traffic.input_tokens is None or traffic.output_tokens is None:
        raise ValueError("traffic without a trace has laws of lengths")
    return traffic.input_tokens, traffic.output_tokens
