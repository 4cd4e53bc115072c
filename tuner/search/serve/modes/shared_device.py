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
from functools import partial
from typing import Final

import numpy as np

from tuner.config.serve import Role
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.multiplexing import steady_rate_per_s
from tuner.prices.serve.curves import Floats
from tuner.search.serve.demand import Demand
from tuner.search.serve.launchable import release_refuses
from tuner.search.serve.mixed_batches import prompt_time, split_iteration
from tuner.search.serve.modes.mode import ServingMode
from tuner.search.serve.options import (
    Option,
    at_fractions,
    client_ttft_s,
    most_running,
    step_seconds,
)
from tuner.search.serve.problem import ModeSolution, ServeProblem
from tuner.search.serve.routers import RouterChoice
from tuner.search.serve.simulation import (
    InstanceGroup,
    SimulationResult,
    busy_ratio,
    client_result,
    loop_requests,
    option_step_times,
    per_rank,
    rank_concurrency,
    sample_rank_requests,
    simulate_by_share,
)
from tuner.simulate.serving.shared import Phases, simulate_shared
from tuner.spec.serving.goal import ServeGoal
from tuner.units import format_ratio

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
                1.0, most_running(option.kv_tokens, demand, traits=option.iteration.traits), BATCHES
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
    yield from at_fractions(
        option,
        running_N,
        rate_N,
        tpot_s_N,
        role=Role.AGGREGATED,
        ttft_s=client_ttft_s(whole, demand, read_s=prompt_s),
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


def _variants(problem: ServeProblem) -> tuple[ServeProblem, ...]:
    made = multiplexed_options(problem.options.options, problem.demand)
    launched = tuple(option for option in made if not release_refuses(option, problem.spec))
    options = replace(problem.options, options=launched or made)
    return (replace(problem, options=options),) if made else ()


def _simulate(
    problem: ServeProblem, groups: Sequence[InstanceGroup], _router: RouterChoice
) -> SimulationResult:
    return simulate_by_share(
        groups,
        partial(_simulate_instance, goal=problem.spec.goal, demand=problem.demand),
        goal=problem.spec.goal,
    )


def _simulate_instance(
    group: InstanceGroup, share: float, *, goal: ServeGoal, demand: Demand
) -> SimulationResult:
    """Simulate one instance, which stands for the others of its group."""
    option, ranks = group.option, group.ranks
    if option.prefill_share_ratio is None:
        raise ValueError("a shared instance states its share")
    demand = demand.on(option.role, ranks=option.degrees.attention_data)
    concurrency = rank_concurrency(demand, share=share, ranks=ranks)
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
    return client_result(served, group, goal=goal, demand=demand, share=share)


def _words(solution: ModeSolution) -> str:
    share = solution.groups[0].option.prefill_share_ratio
    return "" if share is None else f", {format_ratio(share, digits=0)} of the SMs for prefill"


def _cautions(_solution: ModeSolution) -> Iterator[str]:
    yield (
        "multiplexed devices are priced from published curves (semi-PD, Nexus), not from"
        " measurements; the engine's loop for them does not hide the host's work between"
        " steps, which is not priced, and sglang 0.5.23 warns of slow steps with torch after"
        " 2.6: measure before relying on it"
    )


MODE = ServingMode(
    priced_roles=(Role.AGGREGATED, Role.DECODE),
    makes_options=True,
    variants=_variants,
    simulate=_simulate,
    words=_words,
    cautions=_cautions,
)
