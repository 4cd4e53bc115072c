"""Long prompts prefilled on another pool: thresholds, and what instances serve at each.

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

Not covered: thresholds that move with the load; a remote pool that also serves whole requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.config.serve import Role
from tuner.costs.serve.offload import PromptSplit, split_at
from tuner.prices.serve.curves import Floats
from tuner.search.serve.demand import Demand
from tuner.search.serve.first_token import client_ttft_s
from tuner.search.serve.mixed_batches import lasting_running, prompt_time, token_seconds
from tuner.search.serve.options import FRACTIONS, LONGEST_S, Option, most_running
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.requests import sample_requests

PROMPTS: Final = 4000
"""Prompts that are drawn to know their lengths."""
QUANTILES: Final = (0.25, 0.5, 0.7, 0.85, 0.95)
"""Quantiles of the lengths to compute at which thresholds are tried."""
POINTS: Final = 6
"""Lengths at which prompts of one side are priced, evenly in their quantiles."""
BATCHES: Final = 16
SEED: Final = 20_252


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthThreshold:
    """Prompts on both sides of a threshold."""

    above_tokens: int
    """Prompts with more to compute are long."""
    split: PromptSplit
    tokens_N: Floats
    """Tokens to compute of every prompt that was drawn."""
    computed_ratio: float
    """Share of a prompt that must be computed; the rest is found in the prefix cache."""

    @property
    def long_share(self) -> float:
        """Return the share of the requests whose prompts are long."""
        return self.split.long_share

    def input_tokens(self, *, is_long: bool) -> float:
        """Tokens of a mean prompt of one side, what is found in the cache included."""
        mean = self.split.long_mean if is_long else self.split.short_mean
        return mean(self.tokens_N) / self.computed_ratio

    def lengths(self, *, is_long: bool) -> Floats:
        """Tokens to compute of equally likely prompts of one side."""
        own_N = self.tokens_N[(self.tokens_N > self.above_tokens) == is_long]
        return np.asarray(np.quantile(own_N, (np.arange(POINTS) + 0.5) / POINTS))


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
                1.0, most_running(option.kv_tokens, demand, engine=option.iteration.engine), BATCHES
            )
        )
    ).astype(np.float64)
    tpot_s_N = token_seconds(option.iteration, running_N, short, step_tokens=option.step_tokens)
    lasting = lasting_running(option.iteration, short, step_tokens=option.step_tokens)
    lasting_N = np.minimum(running_N, lasting)
    rate_N = option.degrees.attention_data * lasting_N / (demand.output_tokens * tpot_s_N)
    rate_N = np.where(tpot_s_N <= min(demand.tpot_s, LONGEST_S), rate_N, 0.0)
    fastest = int(rate_N.argmax())
    chosen = {int(np.searchsorted(running_N, part * running_N[fastest])) for part in FRACTIONS}
    for at in sorted(chosen):
        if rate_N[at] > 0.0:
            yield replace(
                option,
                role=Role.DECODE,
                running=int(running_N[at]),
                rate_per_s=float(rate_N[at]),
                ttft_s=first_s,
                tpot_s=float(tpot_s_N[at]),
            )
