"""Ways to run one instance on a pool, and what each serves.

    n running sequences of a rank    I computed tokens of a prompt    O tokens of an answer
    T(n) seconds of a decode step    P seconds of a prompt            d attention-data ranks

    prefill      d / P requests a second; a first token after P at least
    decode       d n / (O T(n)); a token every T(n)
    aggregated   a rank that answers x requests a second spends x O / n steps and x prompts:
                 x = 1 / (O T(n) / n + P), a token every n / (x O) = T(n) + n P / O

Of every way the most sequences that memory holds and the target of the time per token allows are
taken, and fractions of them, since waiting may leave no room for so many. Ways that do not fit, or
miss a target even alone, are counted as illegal.

Not covered: pipelines inside an instance.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.costs.serving.decoder import Decoder, Formats
from tuner.costs.serving.engine import TRAITS, Degrees, Engine
from tuner.costs.serving.iteration import Iteration
from tuner.costs.serving.machine import ServingMachine
from tuner.costs.serving.memory import kv_tokens, weight_bytes
from tuner.planner.serve.demand import Demand
from tuner.serve_plan import Role
from tuner.spec.cluster import Pool

MOST_RUNNING: Final = 1024
"""Sequences of one rank: what engines' CUDA graphs are captured for at most."""
FRACTIONS: Final = (1.0, 0.5)
"""Of the most sequences that a way allows."""
LARGEST_INSTANCE: Final = 64
"""Devices."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolSite:
    """One pool as an engine finds it."""

    pool: Pool
    machine: ServingMachine
    memory_bytes: float
    """Of one device."""
    source: str
    """`measured`, `imported` or `datasheet`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """One way to run one instance."""

    site: PoolSite
    role: Role
    degrees: Degrees
    iteration: Iteration
    running: int
    """Sequences of one attention-data rank."""
    rate_per_s: float
    """Of one instance."""
    ttft_s: float
    """Without waiting; 0 for decode."""
    tpot_s: float
    """0 for prefill."""
    kv_tokens: float
    """Of one attention-data rank."""

    @property
    def devices(self) -> int:
        """Of one instance."""
        return self.degrees.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was found."""

    options: tuple[Option, ...]
    illegal: int
    """Ways that break a rule of the model, do not fit, or miss a target by themselves."""
    slowest_tpot_s: float
    """The least time per token that any way reaches alone; infinite where none fits."""
    slowest_ttft_s: float


def options_of(
    sites: tuple[PoolSite, ...],
    *,
    decoder: Decoder,
    formats: Formats,
    engine: Engine,
    demand: Demand,
    roles: tuple[Role, ...],
) -> Options:
    """Price every way on every pool."""
    found: list[Option] = []
    illegal = 0
    least_tpot_s = least_ttft_s = float("inf")
    for site in sites:
        for degrees in _degrees(site, decoder):
            iteration = Iteration(
                decoder=decoder,
                formats=formats,
                degrees=degrees,
                engine=engine,
                machine=site.machine,
            )
            cache = _cache_tokens(iteration, site)
            if cache < demand.longest_input + demand.longest_output:
                illegal += len(roles)
                continue
            prompt_s = prompt_seconds(iteration, tokens=demand.computed_tokens, demand=demand)
            alone_s = float(step_seconds(iteration, np.ones(1), demand)[0])
            least_tpot_s = min(least_tpot_s, alone_s)
            least_ttft_s = min(least_ttft_s, prompt_s)
            for role in roles:
                made = tuple(_of_role(site, iteration, role, prompt_s, cache, demand))
                illegal += not made
                found += made
    return Options(
        options=tuple(found),
        illegal=illegal,
        slowest_tpot_s=least_tpot_s,
        slowest_ttft_s=least_ttft_s,
    )


def _degrees(site: PoolSite, decoder: Decoder) -> Iterator[Degrees]:
    """Powers of two up to the pool: heads and experts divide, attention data needs experts."""
    heads = min(group.attention.heads for group in decoder.layers)
    most = min(site.pool.num_devices, LARGEST_INSTANCE)
    devices = 1
    while devices <= most:
        tensor = 1
        while tensor <= min(devices, site.pool.domain):
            data = devices // tensor
            if heads % tensor == 0 and (data == 1 or decoder.experts is not None):
                yield from _expert_degrees(decoder, tensor=tensor, data=data)
            tensor *= 2
        devices *= 2


def _expert_degrees(decoder: Decoder, *, tensor: int, data: int) -> Iterator[Degrees]:
    own = decoder.experts
    devices = tensor * data
    if own is None or devices == 1:
        yield Degrees(attention_tensor=tensor, attention_data=data)
        return
    if own.num % devices == 0:
        yield Degrees(attention_tensor=tensor, attention_data=data, expert=devices)
    # Narrower slices of an expert than 128 fill no tile of a tensor core.
    if data == 1 and own.ffn % (128 * devices) == 0:
        yield Degrees(attention_tensor=tensor, attention_data=data, moe_tensor=devices)


def _cache_tokens(iteration: Iteration, site: PoolSite) -> float:
    return kv_tokens(
        iteration.decoder,
        iteration.formats,
        iteration.degrees,
        traits=TRAITS[iteration.engine],
        memory_bytes=site.memory_bytes,
    )


def memory_of(option: Option, demand: Demand) -> int:
    """Bytes of one device: weights, and the cache of the sequences that run."""
    iteration = option.iteration
    weights = weight_bytes(iteration.decoder, iteration.formats, iteration.degrees)
    held = option.running * (demand.input_tokens + demand.output_tokens)
    per_token = (TRAITS[iteration.engine].memory_ratio * option.site.memory_bytes - weights) / max(
        option.kv_tokens, 1.0
    )
    return int(weights + min(held, option.kv_tokens) * max(per_token, 0.0))


def step_seconds(
    iteration: Iteration,
    running_N: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    demand: Demand,
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Seconds of a decode step with so many sequences, half of their answers written."""
    past_N = np.full_like(running_N, demand.input_tokens + 0.5 * demand.output_tokens)
    return np.asarray(
        iteration.linear_s(running_N)
        + iteration.head_s(running_N)
        + iteration.decode_s(running_N, past_N)
        + iteration.scheduler_s
    )


def prompt_seconds(iteration: Iteration, *, tokens: float, demand: Demand) -> float:
    """Seconds of one prompt alone, in steps of the engine's budget.

    What is found in the prefix cache is attended to and not computed.
    """
    cached = max(demand.input_tokens - demand.computed_tokens, 0.0)
    budget = float(TRAITS[iteration.engine].step_tokens)
    steps = max(np.ceil(tokens / budget), 1.0)
    each = np.array([tokens / steps])
    linear_s = float(iteration.linear_s(each)[0]) * steps
    whole = iteration.prompt_s(np.array([cached + tokens, max(cached, 1.0)]))
    attention_s = float(whole[0] - (whole[1] if cached > 0.0 else 0.0))
    head_s = float(iteration.head_s(np.ones(1))[0])
    traits = TRAITS[iteration.engine]
    gaps_s = steps * traits.scheduler_s * traits.prompt_scheduler_ratio
    return float(linear_s + attention_s + head_s + gaps_s)


def _of_role(
    site: PoolSite,
    iteration: Iteration,
    role: Role,
    prompt_s: float,
    cache: float,
    demand: Demand,
) -> Iterator[Option]:
    data = iteration.degrees.attention_data
    needs_first = role in (Role.PREFILL, Role.AGGREGATED)
    if needs_first and prompt_s > demand.ttft_s:
        return
    if role is Role.PREFILL:
        yield _option(site, iteration, role, 1, data / prompt_s, prompt_s, 0.0, cache)
        return
    running_N = np.unique(np.round(np.geomspace(1.0, most_running(cache, demand), 48))).astype(
        np.float64
    )
    step_s_N = step_seconds(iteration, running_N, demand)
    if role is Role.AGGREGATED:
        tpot_s_N = step_s_N + running_N * prompt_s / demand.output_tokens
    else:
        tpot_s_N = step_s_N
    rate_N = data * running_N / (demand.output_tokens * tpot_s_N)
    allowed = np.flatnonzero(tpot_s_N <= demand.tpot_s)
    if not len(allowed):
        return
    best = allowed[rate_N[allowed].argmax()]
    chosen = {
        int(allowed[np.searchsorted(running_N[allowed], share * running_N[best])])
        for share in FRACTIONS
    }
    for at in sorted(chosen):
        first_s = prompt_s if role is Role.AGGREGATED else 0.0
        yield _option(
            site,
            iteration,
            role,
            int(running_N[at]),
            float(rate_N[at]),
            first_s,
            float(tpot_s_N[at]),
            cache,
        )


def most_running(cache: float, demand: Demand) -> float:
    """Sequences that memory holds, mean lengths, but one of the longest."""
    spare = cache - (demand.longest_input + demand.longest_output)
    mean = demand.input_tokens + demand.output_tokens
    return float(np.clip(1.0 + spare / mean, 1.0, MOST_RUNNING))


def _option(
    site: PoolSite,
    iteration: Iteration,
    role: Role,
    running: int,
    rate_per_s: float,
    ttft_s: float,
    tpot_s: float,
    cache: float,
) -> Option:
    return Option(
        site=site,
        role=role,
        degrees=iteration.degrees,
        iteration=iteration,
        running=running,
        rate_per_s=rate_per_s,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        kv_tokens=cache,
    )
