"""Instances that multiplex prefill and decode on one GPU: the best SM split of each layout.

For every layout the shares x of the multiprocessors in steps of eight are tried, a prompt is priced
on x and a step on 1 - x beside it (tuner/costs/serve/multiplexing.py), and the most running
sequences count at which the steady state keeps the targets. Of all shares the one that serves the
most requests a second is kept, at fractions of its sequences, since waiting may leave no room for
all.

Not covered: attention-data ranks and pipelines, drafting and half batches, which no release runs
with multiplexing; the host's time that an overlapped scheduler hides, which SGLang's loop for
shared devices does not (sglang 0.5.23, srt/arg_groups/validation_hook.py asks for
`--disable-overlap-schedule`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tuner.config.serve import Role
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.multiplexing import DeviceShare, drawn_ratio, on_share, steady_rate_per_s
from tuner.prices.serve.curves import Floats
from tuner.search.serve.demand import Demand
from tuner.search.serve.first_token import client_ttft_s
from tuner.search.serve.mixed_batches import prompt_time
from tuner.search.serve.options import FRACTIONS, Option, most_running, step_seconds

UNITS: Final = 8
"""Multiprocessors that a share is a multiple of: green contexts of Hopper (CUDA driver API)."""
LEAST_UNITS: Final = 16
"""Smallest number of multiprocessors of a phase (sglang 0.5.23, srt/multiplex/pdmux_context.py)."""
SHARES: Final = 6
"""Tried between the least and the most."""
BATCHES: Final = 24
"""Numbers of running sequences."""


def multiplexed_options(options: Sequence[Option], demand: Demand) -> tuple[Option, ...]:
    """Return multiplexed options, made of those that decode without multiplexing."""
    kinds: dict[object, Option] = {}
    for option in options:
        if can_share(option):
            key = option.serving_pool.pool.name, option.degrees
            known = kinds.setdefault(key, option)
            if option.step_tokens > known.step_tokens:
                kinds[key] = option
    return tuple(
        made
        for option in kinds.values()
        for made in _shared(option, demand.on(option.role, ranks=option.degrees.attention_data))
    )


def can_share(option: Option) -> bool:
    """Return whether an option can be multiplexed: it decodes, on one plain rank."""
    iteration = option.iteration
    return (
        option.role is not Role.PREFILL
        and option.degrees.attention_data == option.degrees.pipeline == 1
        and iteration.drafting is None
        and not iteration.two_batch_overlap
    )


def sm_shares(option: Option) -> tuple[float, ...]:
    """Return shares of prefill that the device can be divided by."""
    units = option.serving_pool.machine.sheet.compute_units
    largest_multiple = max((units - LEAST_UNITS) // UNITS, 1)
    least = min(-(-LEAST_UNITS // UNITS), largest_multiple)
    chosen = np.unique(np.round(np.linspace(least, largest_multiple, SHARES)))
    return tuple(float(multiple) * UNITS / units for multiple in chosen if multiple * UNITS < units)


def _shared(option: Option, demand: Demand) -> Iterator[Option]:
    running_N = np.unique(
        np.round(
            np.geomspace(
                1.0, most_running(option.kv_tokens, demand, engine=option.iteration.engine), BATCHES
            )
        )
    ).astype(np.float64)
    whole = option.iteration
    isolated_s_N = step_seconds(whole, running_N, demand)
    best: tuple[float, float, float, Floats, Floats] | None = None
    for ratio in sm_shares(option):
        prompt_s, multiplexed_s_N = price_shares(
            whole, ratio, running_N, demand, step_tokens=option.step_tokens
        )
        if client_ttft_s(whole, demand, read_s=prompt_s) > demand.ttft_s:
            continue
        rate_N, tpot_s_N = steady_rate_per_s(
            running_N,
            isolated_s_N=isolated_s_N,
            multiplexed_s_N=multiplexed_s_N,
            prompt_s=prompt_s,
            output_tokens=demand.output_tokens,
        )
        rate_N = np.where(tpot_s_N <= demand.tpot_s, rate_N, 0.0)
        if rate_N.max() > (best[0] if best else 0.0):
            best = float(rate_N.max()), ratio, prompt_s, rate_N, tpot_s_N
    if best is None:
        return
    _, ratio, prompt_s, rate_N, tpot_s_N = best
    fastest = int(rate_N.argmax())
    chosen = {int(np.searchsorted(running_N, part * running_N[fastest])) for part in FRACTIONS}
    for at in sorted(chosen):
        if rate_N[at] > 0.0:
            yield replace(
                option,
                role=Role.AGGREGATED,
                running=int(running_N[at]),
                rate_per_s=float(rate_N[at]),
                ttft_s=client_ttft_s(whole, demand, read_s=prompt_s),
                tpot_s=float(tpot_s_N[at]),
                is_chunked=False,
                prefill_share_ratio=ratio,
            )


def price_shares(
    whole: Iteration, ratio: float, running_N: Floats, demand: Demand, *, step_tokens: int
) -> tuple[float, Floats]:
    """Return the seconds of a prompt on a share, and of steps on the rest beside it."""
    reading, writing = split_iteration(whole, ratio, demand, step_tokens=step_tokens)
    prompt_s = prompt_time(reading, demand, step_tokens=step_tokens).latency_s
    return prompt_s, step_seconds(writing, running_N, demand)


def split_iteration(
    whole: Iteration, ratio: float, demand: Demand, *, step_tokens: int
) -> tuple[Iteration, Iteration]:
    """Return prefill on its share, and decode on what is left beside it."""
    reading = on_share(whole, DeviceShare(compute_ratio=ratio))
    prompt_s = prompt_time(reading, demand, step_tokens=step_tokens).latency_s
    drawn = drawn_ratio(whole, tokens=demand.computed_tokens, seconds=prompt_s)
    return reading, on_share(
        whole, DeviceShare(compute_ratio=1.0 - ratio, memory_ratio=1.0 - drawn)
    )
