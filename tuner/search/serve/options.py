"""Options for one instance on a pool, and what each serves.

    n running sequences of a rank    T(n) seconds per token of a decode step    d data ranks
    P seconds of a prompt            O output tokens

    prefill      d / P requests a second; a first token after P at least
    decode       d n / (O T(n)); a token every T(n)
    aggregated   d n / (O U(n)), where U(n) is a token's time beside prompts (mixed_batches.py)

Each option runs the most sequences that memory and the TPOT target allow, and fractions of them,
since queueing may leave no slack for so many. Options that do not fit, that miss a target even
without load, or that the engine's release refuses, are counted as illegal by reason; of
the rest, dominated ones are dropped.

One option dominates another of the same role, pool and cache layout where, on the same devices, it
serves as many requests a second at no longer TTFT and TPOT. Between different layouts it must serve
5 % more: closer ones are within the model's error and count as ties of the plan.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np

from tuner.catalog.serve_rules.rules import nodes_needed
from tuner.catalog.serve_rules.traits import EngineTraits
from tuner.config.serve import Role
from tuner.costs.serve.bands import Bands, bands_of, bands_of_steps
from tuner.costs.serve.capacity import (
    cache_tokens,
    holds_whole,
    instance_kv_bytes_per_token,
    instance_weight_bytes,
)
from tuner.costs.serve.decoder import Decoder, Formats
from tuner.costs.serve.engine import A2aBackend, InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.remote_ffn import RemoteFfnIteration
from tuner.costs.serve.reserve import step_reserve
from tuner.costs.serve.residual import ServeResidual
from tuner.costs.serve.whole_step import step_s
from tuner.prices.profile import ProfilePrices
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.machine import ServingMachine
from tuner.search.serve.choices import Choices, TokenBudget, usual_choices
from tuner.search.serve.degrees import has_slow_links, instance_degrees, spread_degrees
from tuner.search.serve.demand import MOST_RUNNING, Demand
from tuner.search.serve.mixed_batches import PromptTime, lasting_running, prompt_time, token_seconds
from tuner.simulate.serving.batching import WATERMARK_RATIO
from tuner.simulate.serving.client import engine_client
from tuner.spec.cluster import Pool
from tuner.spec.serving.goal import Mode

BATCHES: Final = 32
"""Numbers of sequences that are priced."""
LONGEST_S: Final = 60.0
"""Seconds between two tokens that no deployment exceeds; the limit without a target."""
PREFILL_PLACES: Final = 16
"""Sequences of a prefill-only rank: each keeps its place until its cache has been handed
over (SGLang's queue of transfers under way), and short prompts share steps."""
FRACTIONS: Final = (1.0, 0.5)
"""Shares of the most sequences of a rank that become options."""
UNFIT: Final = {
    Role.PREFILL: (A2aBackend.LOW_LATENCY,),
    Role.DECODE: (A2aBackend.NORMAL,),
}
"""Kernels of DeepEP that are not made for a role: low-latency ones hold few tokens, normal ones
keep decode steps out of CUDA graphs (github.com/deepseek-ai/DeepEP, README)."""
BAND_RATIO: Final = 0.05
"""Half of the median error of the time per token."""
NO_ROOM: Final = "no memory for the longest request beside the weights"
SLOW_PROMPT: Final = "a prompt alone misses the target of the first token"
SLOW_TOKEN: Final = "a sequence alone misses the target of the time per token"


Layout = tuple[Role, str, int, int]
"""Role, pool, attention-tensor degree, pipeline stages."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingPool:
    """One pool with the machine model that prices an engine on it."""

    pool: Pool
    machine: ServingMachine
    memory_bytes: float
    """Bytes of memory of one device."""
    source: str
    """Source of the prices: `profile`, `tables` or `datasheet`."""
    conversions: ProfilePrices | None = None
    """Measured rates at which a device turns KV caches into other pages; None: not measured."""
    residual: ServeResidual | None = None
    """Corrections from launches of the engine on these devices; None: no launches."""
    profile: Path | None = None
    """Profile that describes the devices, where they have no datasheet."""
    start_up_s: float | None = None
    """Seconds from the start of the engine until it takes requests; None: not measured."""

    @property
    def measured_bands(self) -> Bands | None:
        """Return bands from measurements on these devices; None: published launches have to do."""
        if self.residual is not None:
            return self.residual.bands
        return None if self.machine.host is None else bands_of_steps()

    def bands(self, engine: str, *, release: str, mode: Mode, decoder: Decoder) -> Bands:
        """Return the bands of latencies on these devices: as measured, else as published."""
        return self.measured_bands or bands_of(
            engine,
            release=release,
            generation=self.machine.sheet.generation,
            mode=mode,
            has_kernels=not self.machine.estimated,
            decoder=decoder,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """One configuration of one instance."""

    serving_pool: ServingPool
    role: Role
    degrees: InstanceDegrees
    iteration: Iteration
    running: int
    """Running sequences of one attention-data rank."""
    rate_per_s: float
    """Requests a second of one instance."""
    ttft_s: float
    """Seconds to the first token of a prompt alone, as a client sees it; 0 for decode."""
    tpot_s: float
    """Seconds per output token; 0 for prefill."""
    kv_tokens: float
    """Tokens in the KV cache of one attention-data rank."""
    step_tokens: int
    """Budget of a step with prompts, of one attention-data rank."""
    is_chunked: bool
    """Whether prompts are split to fill the budget (chunked prefill)."""
    page_tokens: int | None = None
    """Tokens of a page of cache; None: the engine's own."""
    prefill_share_ratio: float | None = None
    """Prefill's share of a device's multiprocessors, where prefill and decode share devices."""

    @property
    def devices(self) -> int:
        """Count the devices of one instance; of an AFD unit those of its FFN server too."""
        iteration = self.iteration
        ffn = iteration.ffn.degrees.devices if isinstance(iteration, RemoteFfnIteration) else 0
        return self.degrees.devices + ffn

    @property
    def layout(self) -> Layout:
        """Return all that the layout of its caches depends on."""
        degrees, pool = self.degrees, self.serving_pool.pool.name
        return self.role, pool, degrees.attention_tensor, degrees.pipeline


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchCurve:
    """One configuration in one role at every priced batch, those that miss a target included."""

    option: Option
    """The configuration; its batch is one of many."""
    running_N: Floats
    """Sequences of one attention-data rank, as many as last."""
    tpot_s_N: Floats
    rate_N: Floats
    """Requests a second of one instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Priced options."""

    options: tuple[Option, ...] = ()
    illegal_by: Mapping[str, int] = field(default_factory=dict)
    """Options that cannot serve or are refused, by the reason, most first."""
    refused: Mapping[Role, str] = field(default_factory=dict)
    """Roles whose every option is refused, with the most frequent reason."""
    refused_units: tuple[Option, ...] = ()
    """AFD units that would serve, but that the release refuses."""
    beaten: int = 0
    """Options that another one dominates."""
    slowest_tpot_s: float = math.inf
    """The least TPOT that any option reaches without load; infinite where none fits."""
    slowest_ttft_s: float = math.inf
    curves: tuple[BatchCurve, ...] = ()
    """Launchable options that decode, at all their batches."""


Refuse = Callable[[Option], str]
"""Says in a line why an engine's release does not launch an option; empty: it does."""


def price_options(
    serving_pools: tuple[ServingPool, ...],
    *,
    decoder: Decoder,
    formats: Formats,
    traits: EngineTraits,
    release: str = "",
    demand: Demand,
    roles: tuple[Role, ...],
    choices: Choices | None = None,
    refuse: Refuse = lambda _: "",
) -> Options:
    """Price every option on every pool.

    Args:
        serving_pools: pools.
        decoder: the model.
        formats: its storage.
        traits: of the engine.
        release: of the engine; empty: the newest.
        demand: the traffic.
        roles: of the instances.
        choices: what varies beside the degrees; None: the engine's usual budget alone.
        refuse: called with every option.
    """
    launchable: list[Option] = []
    curves: list[BatchCurve] = []
    illegal: Counter[str] = Counter()
    refused: dict[Role, Counter[str]] = {role: Counter() for role in roles}
    least_tpot_s = least_ttft_s = float("inf")
    plain = (decoder, formats, traits, release)
    for candidate in _candidates(serving_pools, plain, choices or usual_choices(traits), demand):
        suited_roles = [role for role in roles if candidate.suits(role)]
        if not len(candidate.running_N):
            illegal[NO_ROOM] += len(suited_roles)
            continue
        prompts: dict[float, PromptTime] = {}
        least_tpot_s = min(
            least_tpot_s, float(candidate.decode_s_N[0]) / candidate.iteration.tokens_per_step
        )
        for role in suited_roles:
            own_demand = demand.on(role, ranks=candidate.iteration.degrees.attention_data)
            prompt = prompts.get(own_demand.computed_tokens) or candidate.prompt(own_demand)
            prompts[own_demand.computed_tokens] = prompt
            least_ttft_s = min(least_ttft_s, prompt.latency_s)
            made, reason, curve = _price_role(candidate, role, prompt, own_demand)
            refusals = [refuse(option) for option in made]
            if curve is not None and not (refusals or [refuse(curve.option)])[0]:
                curves.append(curve)
            refused[role].update(refusal for refusal in refusals if refusal)
            illegal.update(refusal for refusal in (reason, *refusals) if refusal)
            launchable += [option for option, no in zip(made, refusals, strict=True) if not no]
    served = {option.role for option in launchable}
    kept = sorted(drop_dominated(launchable), key=lambda option: roles.index(option.role))
    return Options(
        options=tuple(kept),
        illegal_by=dict(illegal.most_common()),
        refused={
            role: counts.most_common(1)[0][0]
            for role, counts in refused.items()
            if counts and role not in served
        },
        beaten=len(launchable) - len(kept),
        slowest_tpot_s=least_tpot_s,
        slowest_ttft_s=least_ttft_s,
        curves=tuple(curves),
    )


def decode_options(
    serving_pool: ServingPool,
    iteration: Iteration,
    *,
    budget: TokenBudget,
    demand: Demand,
    page_tokens: int | None,
) -> tuple[tuple[Option, ...], str]:
    """Return decode instances that take such steps, at the batches worth trying.

    Returns:
        Options, or none and the reason.
    """
    pages = {} if page_tokens is None else {serving_pool.pool.name: page_tokens}
    choices = Choices(budgets=(budget,), page_by_pool=pages)
    *_, candidate = _with_budgets(serving_pool, iteration, choices, demand)
    if not len(candidate.running_N):
        return (), NO_ROOM
    made, reason, _ = _price_decode(candidate, demand)
    return made, reason


def merge_options(parts: Sequence[Options], *, roles: tuple[Role, ...]) -> Options:
    """Return the options of pools that different releases serve, as one."""
    if len(parts) == 1:
        return parts[0]
    launchable = [option for part in parts for option in part.options]
    illegal: Counter[str] = Counter()
    for part in parts:
        illegal.update(part.illegal_by)
    return Options(
        options=tuple(sorted(launchable, key=lambda option: roles.index(option.role))),
        illegal_by=dict(illegal.most_common()),
        refused={
            role: next(part.refused[role] for part in parts if role in part.refused)
            for role in roles
            if any(role in part.refused for part in parts)
            and all(option.role is not role for option in launchable)
        },
        refused_units=tuple(option for part in parts for option in part.refused_units),
        beaten=sum(part.beaten for part in parts),
        slowest_tpot_s=min(part.slowest_tpot_s for part in parts),
        slowest_ttft_s=min(part.slowest_ttft_s for part in parts),
        curves=tuple(curve for part in parts for curve in part.curves),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Candidate:
    """An instance whose role and batch are not chosen yet."""

    serving_pool: ServingPool
    iteration: Iteration
    budget: TokenBudget
    page_tokens: int | None
    running_N: Floats
    """Running sequences of a rank that are priced, 1 first; none where the longest request has no
    room."""
    decode_s_N: Floats
    """Seconds of a step of so many sequences without prompts."""
    is_first: bool
    """Whether its budget is the first one; budgets do not matter to decode, which reads no
    prompts."""
    moves_cache: bool | None
    """Whether it sends or receives KV caches; None: the engine needs no memory for that."""

    def prompt(self, demand: Demand) -> PromptTime:
        """Return a prompt alone, its latency as a client sees it."""
        prompt = prompt_time(self.iteration, demand, step_tokens=self.budget.tokens)
        step_s = float(self.decode_s_N[0]) / self.iteration.tokens_per_step
        late_s = engine_client(self.iteration).late_s(step_s)
        return replace(prompt, latency_s=prompt.latency_s + late_s)

    def suits(self, role: Role) -> bool:
        """Return whether the candidate is worth pricing in a role."""
        if self.iteration.a2a_backend in UNFIT.get(role, ()):
            return False
        if self.moves_cache is (role is Role.AGGREGATED):
            return False
        return self.is_first or role is not Role.DECODE

    def cache_tokens(self, demand: Demand, *, running: int) -> float:
        """Return the tokens of a rank's cache beside steps with so many sequences."""
        return _cache_tokens(
            self.iteration,
            self.serving_pool,
            self.budget,
            demand,
            running=running,
            moves_cache=self.moves_cache,
        )

    def option(
        self,
        role: Role,
        demand: Demand,
        *,
        running: int,
        rate_per_s: float,
        ttft_s: float,
        tpot_s: float,
    ) -> Option:
        """Return it with role and batch."""
        return Option(
            serving_pool=self.serving_pool,
            role=role,
            degrees=self.iteration.degrees,
            iteration=self.iteration,
            running=running,
            rate_per_s=rate_per_s,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            kv_tokens=self.cache_tokens(demand, running=running),
            step_tokens=self.budget.tokens,
            is_chunked=self.budget.is_chunked,
            page_tokens=self.page_tokens,
        )


def _candidates(
    serving_pools: tuple[ServingPool, ...],
    plain: tuple[Decoder, Formats, EngineTraits, str],
    choices: Choices,
    demand: Demand,
) -> Iterator[_Candidate]:
    decoder, formats, traits, release = plain
    for serving_pool in serving_pools:
        needs_stages = True
        for degrees in (
            spread_degrees(serving_pool.pool, decoder)
            if choices.is_spread
            else instance_degrees(serving_pool.pool, decoder, has_copies=choices.copies.is_launched)
        ):
            is_slow = has_slow_links(serving_pool.machine.sheet, serving_pool.pool)
            if degrees.pipeline > 1 and not (is_slow or needs_stages or choices.is_spread):
                break
            plain_iteration = Iteration(
                decoder=decoder,
                formats=formats,
                degrees=degrees,
                traits=traits,
                machine=serving_pool.machine,
                stream_s=traits.rank_stream_s(degrees.attention_data),
                release=release,
            )
            for iteration, (drafting, a2a_backend, overlaps) in product(
                _with_expert_copies(plain_iteration, serving_pool.pool, choices),
                choices.variants(degrees),
            ):
                varied = replace(
                    iteration,
                    drafting=drafting,
                    a2a_backend=a2a_backend,
                    two_batch_overlap=overlaps,
                )
                for candidate in _with_budgets(serving_pool, varied, choices, demand):
                    has_room = (
                        len(candidate.running_N) > 0 and degrees.devices <= serving_pool.pool.domain
                    )
                    needs_stages = needs_stages and not has_room
                    yield candidate


def _with_expert_copies(iteration: Iteration, pool: Pool, choices: Choices) -> Iterator[Iteration]:
    """Yield an instance with the numbers of copies of experts that are worth a try."""
    degrees, experts = iteration.degrees, iteration.decoder.experts
    if experts is None:
        yield iteration
        return
    ranks = degrees.expert * degrees.moe_tensor
    nodes = nodes_needed(ranks, devices_per_node=pool.devices_per_node)
    for redundant, loads in choices.copies.solve_and_simulate(
        experts, ranks=degrees.expert, nodes=nodes
    ):
        yield replace(iteration, redundant_experts=redundant, loads=loads)


def _with_budgets(
    serving_pool: ServingPool, iteration: Iteration, choices: Choices, demand: Demand
) -> Iterator[_Candidate]:
    priced: dict[int, tuple[Floats, Floats]] = {}
    moves = (False, True) if iteration.memory_rule.allocates_late else (None,)
    for (number, budget), moves_cache in product(enumerate(choices.budgets), moves):
        tokens = partial(
            _cache_tokens, iteration, serving_pool, budget, demand, moves_cache=moves_cache
        )
        longest = demand.longest_input + demand.longest_output
        running_N, decode_s_N = np.zeros(0), np.zeros(0)
        if tokens(running=1) >= longest and _holds_whole(
            iteration, serving_pool, budget, demand, running=1
        ):
            largest_batch = _most_sequences(iteration, serving_pool, budget, demand, tokens=tokens)
            if largest_batch not in priced:
                batches = np.geomspace(1.0, largest_batch, BATCHES)
                running_N = np.unique(np.round(batches)).astype(np.float64)
                priced[largest_batch] = running_N, step_seconds(iteration, running_N, demand)
            running_N, decode_s_N = priced[largest_batch]
        yield _Candidate(
            serving_pool=serving_pool,
            iteration=iteration,
            budget=budget,
            page_tokens=choices.page_by_pool.get(serving_pool.pool.name),
            running_N=running_N,
            decode_s_N=decode_s_N,
            is_first=number == 0,
            moves_cache=moves_cache,
        )


def _cache_tokens(
    iteration: Iteration,
    serving_pool: ServingPool,
    budget: TokenBudget,
    demand: Demand,
    *,
    running: int,
    moves_cache: bool | None,
) -> float:
    """Tokens of a rank's cache beside what steps with so many sequences take of memory."""
    return cache_tokens(
        iteration,
        memory_bytes=serving_pool.memory_bytes,
        step_tokens=budget.tokens,
        running=running,
        request_tokens=demand.held_tokens,
        longest=demand.most_tokens,
        moves_cache=moves_cache is True,
    )


def _holds_whole(
    iteration: Iteration,
    serving_pool: ServingPool,
    budget: TokenBudget,
    demand: Demand,
    *,
    running: int,
) -> bool:
    """Return whether a request of the longest length has room, where the engine wants that."""
    return holds_whole(
        iteration,
        memory_bytes=serving_pool.memory_bytes,
        step_tokens=budget.tokens,
        running=running,
        tokens=demand.most_tokens,
    )


def _most_sequences(
    iteration: Iteration,
    serving_pool: ServingPool,
    budget: TokenBudget,
    demand: Demand,
    *,
    tokens: Callable[..., float],
) -> int:
    """Most sequences that fit into what the steps of so many leave of memory; 1 at least."""
    low, high = 1, min(MOST_RUNNING, demand.most_at_once) + 1
    while high - low > 1:
        middle = (low + high) // 2
        cache = tokens(running=middle)
        has_room = most_running(cache, demand, traits=iteration.traits) >= middle
        has_room = has_room and _holds_whole(
            iteration, serving_pool, budget, demand, running=middle
        )
        low, high = (middle, high) if has_room else (low, middle)
    return low


def drop_dominated(options: Sequence[Option]) -> tuple[Option, ...]:
    """Return those that none dominates, in their order; of equal ones the first."""
    by_layout: dict[Layout, list[Option]] = {}
    for option in options:
        by_layout.setdefault(option.layout, []).append(option)
    kept = {id(option) for group in by_layout.values() for option in _undominated(group)}
    return tuple(option for option in options if id(option) in kept)


def _undominated(options: Sequence[Option]) -> list[Option]:
    front: list[Option] = []
    # A later option cannot dominate an earlier one.
    for option in sorted(
        options,
        key=lambda candidate: (-candidate.rate_per_s / candidate.devices, candidate.devices),
    ):
        if not any(_beats(kept, option) for kept in front):
            front.append(option)
    return front


def _beats(kept: Option, option: Option) -> bool:
    is_like = kept.degrees == option.degrees
    least = option.rate_per_s if is_like else (1.0 + BAND_RATIO) * option.rate_per_s
    return (
        option.devices // kept.devices * kept.rate_per_s >= least
        and kept.ttft_s <= option.ttft_s
        and kept.tpot_s <= option.tpot_s
    )


def at_fractions(
    option: Option, running_N: Floats, rate_N: Floats, tpot_s_N: Floats, **changes: Any
) -> Iterator[Option]:
    """Yield an option at the batch that serves the most, and at fractions of it.

    Args:
        option: that decodes.
        running_N: sequences of a rank.
        rate_N: requests a second of one instance; 0 where a target is missed.
        tpot_s_N: seconds per token.
        changes: further fields.
    """
    chosen = {
        int(np.searchsorted(running_N, share * running_N[rate_N.argmax()])) for share in FRACTIONS
    }
    for at in sorted(chosen):
        if rate_N[at] > 0.0:
            yield replace(
                option,
                running=int(running_N[at]),
                rate_per_s=float(rate_N[at]),
                tpot_s=float(tpot_s_N[at]),
                **changes,
            )


def device_memory_bytes(option: Option, demand: Demand) -> int:
    """Bytes of one device: weights, the cache of the sequences that run, and what steps take."""
    iteration = option.iteration
    cached_tokens = min(option.running * demand.held_tokens, option.kv_tokens)
    token_bytes = instance_kv_bytes_per_token(iteration, request_tokens=demand.held_tokens)
    steps = step_reserve(
        iteration,
        step_tokens=option.step_tokens,
        running=option.running,
        moves_cache=option.role is not Role.AGGREGATED,
    )
    return int(instance_weight_bytes(iteration) + cached_tokens * token_bytes + steps.total)


def step_seconds(iteration: Iteration, running_N: Floats, demand: Demand) -> Floats:
    """Seconds of a decode step with so many sequences, as long as running ones are on average."""
    return step_s(iteration, running_N, np.full_like(running_N, demand.past_tokens))


def client_ttft_s(iteration: Iteration, demand: Demand, *, read_s: float) -> float:
    """Seconds from sending a prompt to its first token, where reading it takes `read_s`."""
    step_s = float(step_seconds(iteration, np.ones(1), demand)[0])
    return read_s + engine_client(iteration).late_s(step_s)


def _price_role(
    candidate: _Candidate, role: Role, prompt: PromptTime, demand: Demand
) -> tuple[tuple[Option, ...], str, BatchCurve | None]:
    """Return a candidate's options in a role, or the reason why it has none.

    The curve holds all priced batches, where the role decodes.
    """
    data = candidate.iteration.degrees.attention_data
    if role is not Role.DECODE and prompt.latency_s > demand.ttft_s:
        return (), SLOW_PROMPT, None
    if role is Role.PREFILL:
        first_s, rate = prompt.latency_s, data / prompt.busy_s
        cache = candidate.cache_tokens(demand, running=PREFILL_PLACES)
        most_places = min(PREFILL_PLACES, demand.most_at_once)
        places = int(np.clip(cache // demand.longest_input, 1.0, most_places))
        isolated = candidate.option(
            role, demand, running=places, rate_per_s=rate, ttft_s=first_s, tpot_s=0.0
        )
        return (isolated,), "", None
    if role is Role.DECODE:
        return _price_decode(candidate, demand)
    priced_s = token_seconds(
        candidate.iteration,
        candidate.running_N,
        demand,
        step_tokens=candidate.budget.tokens,
        decode_s_N=candidate.decode_s_N,
    )
    lasting = lasting_running(candidate.iteration, demand, step_tokens=candidate.budget.tokens)
    first_s = prompt.latency_s
    return _price_batches(candidate, role, priced_s, demand, ttft_s=first_s, lasting=lasting)


def _price_decode(
    candidate: _Candidate, demand: Demand
) -> tuple[tuple[Option, ...], str, BatchCurve | None]:
    priced_s = candidate.decode_s_N / candidate.iteration.tokens_per_step
    return _price_batches(candidate, Role.DECODE, priced_s, demand, ttft_s=0.0, lasting=math.inf)


def _price_batches(
    candidate: _Candidate,
    role: Role,
    priced_s: Floats,
    demand: Demand,
    *,
    ttft_s: float,
    lasting: float,
) -> tuple[tuple[Option, ...], str, BatchCurve | None]:
    """Return the options of a decoding candidate, from its TPOT at each batch."""
    running_N = np.arange(1.0, candidate.running_N[-1] + 1.0)
    tpot_s_N = np.interp(running_N, candidate.running_N, priced_s)
    per_s = candidate.iteration.degrees.attention_data / demand.output_tokens
    rate_N = per_s * np.minimum(running_N, lasting) / tpot_s_N

    def at(place: int) -> Option:
        return candidate.option(
            role,
            demand,
            running=int(running_N[place]),
            rate_per_s=float(rate_N[place]),
            ttft_s=ttft_s,
            tpot_s=float(tpot_s_N[place]),
        )

    kept = candidate.running_N <= max(lasting, 1.0)
    curve = partial(
        BatchCurve,
        running_N=candidate.running_N[kept],
        tpot_s_N=priced_s[kept],
        rate_N=per_s * np.minimum(candidate.running_N, lasting)[kept] / priced_s[kept],
    )
    allowed = np.flatnonzero(tpot_s_N <= min(demand.tpot_s, LONGEST_S))
    if not len(allowed):
        return (), SLOW_TOKEN, curve(option=at(0))
    best = allowed[rate_N[allowed].argmax()]
    chosen = {
        int(allowed[np.searchsorted(running_N[allowed], share * running_N[best])])
        for share in FRACTIONS
    }
    made = tuple(at(place) for place in sorted(chosen))
    return made, "", curve(option=made[0])


def most_running(cache: float, demand: Demand, *, traits: EngineTraits) -> float:
    """Sequences that memory has room for except 1 % of the time; 1 at least.

    At most the concurrency of a closed loop. What they take is whole outputs where the engine
    reserves them, else what they have by then.

    Args:
        cache: tokens of a rank.
        demand: the traffic.
        traits: of the engine that admits them.
    """
    fitting = (
        _fitting(demand.reserved_N, cache)
        if traits.reserves_output
        else _fitting(demand.grown_N, (1.0 - WATERMARK_RATIO) * cache)
    )
    return min(fitting, float(demand.most_at_once))


def _fitting(taken_N: Floats, cache: float) -> float:
    return float(max(int(np.searchsorted(taken_N, cache * (1.0 + 1e-9), side="right")), 1))
