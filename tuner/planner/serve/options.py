"""Ways to run one instance on a pool, and what each serves.

    n running sequences of a rank    T(n) seconds per token of a decode step    d data ranks
    P seconds of a prompt            O tokens of an answer

    prefill      d / P requests a second; a first token after P at least
    decode       d n / (O T(n)); a token every T(n)
    aggregated   d n / (O U(n)), where U(n) is a token's time beside prompts (mixed_batches.py)

Of every way the most sequences that memory holds and the target of the time per token allows are
taken, and fractions of them, since waiting may leave no room for so many. Ways that do not fit,
that miss a target even alone, or that the engine's release refuses, are counted as illegal by
reason; of the rest those are dropped that another beats in everything (dominance.py).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import numpy as np

from tuner.costs.kernel_table import KernelTable
from tuner.costs.serving.capacity import cache_tokens, held_kv_bytes_per_token, held_weight_bytes
from tuner.costs.serving.curves import Floats
from tuner.costs.serving.decoder import Decoder, Formats
from tuner.costs.serving.engine import TRAITS, Degrees, Engine, Exchange
from tuner.costs.serving.iteration import Iteration
from tuner.costs.serving.machine import ServingMachine
from tuner.costs.serving.memory_rules import rule_of
from tuner.costs.serving.remote_ffn import RemoteFfnIteration
from tuner.costs.serving.reserve import reserve_of
from tuner.costs.serving.whole_step import step_s
from tuner.planner.serve.choices import Budget, Choices, usual_choices
from tuner.planner.serve.degrees import degrees_of, has_slow_links
from tuner.planner.serve.demand import MOST_RUNNING, Demand
from tuner.planner.serve.dominance import undominated
from tuner.planner.serve.mixed_batches import PromptTime, prompt_time, token_seconds
from tuner.serve_plan import Role
from tuner.simulate.serving.batching import WATERMARK_RATIO
from tuner.simulate.serving.client import STEPS_BEFORE_TOKEN, client_of
from tuner.spec.cluster import Pool
from tuner.spec.serving.manifests.rules import nodes_of

BATCHES: Final = 32
"""Numbers of sequences that are priced."""
LONGEST_S: Final = 60.0
"""Between two tokens; nobody serves slower, and without a target this is the limit."""
PREFILL_PLACES: Final = 16
"""Sequences of a rank that only reads prompts: each keeps its place until its cache has been handed
over (SGLang's queue of transfers under way), and short prompts share steps."""
FRACTIONS: Final = (1.0, 0.5)
"""Of the most sequences that a way allows."""
UNFIT: Final = {
    Role.PREFILL: (Exchange.LOW_LATENCY,),
    Role.DECODE: (Exchange.NORMAL,),
}
"""Kernels of DeepEP that are not made for a role: low-latency ones hold few tokens, normal ones
keep decode steps out of CUDA graphs (github.com/deepseek-ai/DeepEP, README)."""
NEVER_S: Final = 1e6
"""Between two tokens where so many sequences never run at once."""
NO_ROOM: Final = "no memory for the longest request beside the weights"
SLOW_PROMPT: Final = "a prompt alone misses the target of the first token"
SLOW_TOKEN: Final = "a sequence alone misses the target of the time per token"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolSite:
    """One pool as an engine finds it."""

    pool: Pool
    machine: ServingMachine
    memory_bytes: float
    """Of one device."""
    source: str
    """`measured`, `imported` or `datasheet`."""
    conversions: KernelTable | None = None
    """How fast a device turns KV caches into other pages, where that was measured."""


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
    """Of a prompt alone, as a client sees it; 0 for decode."""
    tpot_s: float
    """0 for prefill."""
    kv_tokens: float
    """Of one attention-data rank."""
    step_tokens: int
    """Budget of a step with prompts, of one attention-data rank."""
    is_chunked: bool
    """Prompts are parted to fill it."""
    page_tokens: int | None = None
    """Of a page of cache; None: the engine's own."""
    prefill_share_ratio: float | None = None
    """Of a device's multiprocessors, where prefill and decode share devices."""

    @property
    def devices(self) -> int:
        """Of one instance; of a cell those of its FFN server too."""
        own = self.iteration
        ffn = own.ffn.degrees.devices if isinstance(own, RemoteFfnIteration) else 0
        return self.degrees.devices + ffn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curve:
    """One way in one role at every batch that was priced, those that miss a target included."""

    option: Option
    """The way; its batch is one of many."""
    running_N: Floats
    """Sequences of one attention-data rank."""
    tpot_s_N: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was found."""

    options: tuple[Option, ...]
    illegal_by: Mapping[str, int]
    """Ways that cannot serve, by what stands in the way."""
    refused: Mapping[Role, str]
    """Roles whose every way that could serve is refused, with the reason met most."""
    beaten: int
    """Ways that another beats in everything."""
    slowest_tpot_s: float
    """The least time per token that any way reaches alone; infinite where none fits."""
    slowest_ttft_s: float
    curves: tuple[Curve, ...] = ()
    """Ways that answer and can be launched, at all their batches."""

    @property
    def illegal(self) -> int:
        """Ways that cannot serve."""
        return sum(self.illegal_by.values())


Refuse = Callable[[Option], str]
"""Says in a line why an engine's release does not launch an option; empty: it does."""


def options_of(
    sites: tuple[PoolSite, ...],
    *,
    decoder: Decoder,
    formats: Formats,
    engine: Engine,
    demand: Demand,
    roles: tuple[Role, ...],
    choices: Choices | None = None,
    refuse: Refuse = lambda _: "",
) -> Options:
    """Price every way on every pool.

    Args:
        sites: pools.
        decoder: the model.
        formats: its storage.
        engine: that serves.
        demand: the traffic.
        roles: of the instances.
        choices: what varies beside the degrees; None: the engine's usual budget alone.
        refuse: asked about every option.
    """
    found: list[Option] = []
    curves: list[Curve] = []
    illegal: Counter[str] = Counter()
    refused: dict[Role, Counter[str]] = {role: Counter() for role in roles}
    least_tpot_s = least_ttft_s = float("inf")
    plain = (decoder, formats, engine)
    for way in _ways(sites, plain, choices or usual_choices(engine), demand):
        own = [role for role in roles if way.suits(role)]
        if not len(way.running_N):
            illegal[NO_ROOM] += len(own)
            continue
        prompt = way.prompt(demand)
        least_tpot_s = min(least_tpot_s, float(way.decode_s_N[0]) / way.iteration.tokens_per_step)
        least_ttft_s = min(least_ttft_s, prompt.latency_s)
        for role in own:
            made, reason, curve = _of_role(way, role, prompt, demand)
            answers = [refuse(option) for option in made]
            if curve is not None and not (answers or [refuse(curve.option)])[0]:
                curves.append(curve)
            refused[role].update(answer for answer in answers if answer)
            illegal.update(one for one in (reason, *answers) if one)
            found += [option for option, no in zip(made, answers, strict=True) if not no]
    served = {option.role for option in found}
    kept = sorted(undominated(found), key=lambda option: roles.index(option.role))
    return Options(
        options=tuple(kept),
        illegal_by=dict(illegal.most_common()),
        refused={
            role: counts.most_common(1)[0][0]
            for role, counts in refused.items()
            if counts and role not in served
        },
        beaten=len(found) - len(kept),
        slowest_tpot_s=least_tpot_s,
        slowest_ttft_s=least_ttft_s,
        curves=tuple(curves),
    )


def decode_options(
    site: PoolSite,
    iteration: Iteration,
    *,
    budget: Budget,
    demand: Demand,
    page_tokens: int | None,
) -> tuple[tuple[Option, ...], str]:
    """Return decode instances that take such steps, at the batches worth trying.

    Returns:
        Options, or none and what stands in the way.
    """
    pages = {} if page_tokens is None else {site.pool.name: page_tokens}
    choices = Choices(budgets=(budget,), page_of_pool=pages)
    (way,) = _budgeted(site, iteration, choices, demand)
    if not len(way.running_N):
        return (), NO_ROOM
    made, reason, _ = _of_decode(way, demand)
    return made, reason


def joined_options(parts: Sequence[Options], *, roles: tuple[Role, ...]) -> Options:
    """Return the options of pools that different releases serve, as one."""
    if len(parts) == 1:
        return parts[0]
    found = [option for part in parts for option in part.options]
    illegal: Counter[str] = Counter()
    for part in parts:
        illegal.update(part.illegal_by)
    return Options(
        options=tuple(sorted(found, key=lambda option: roles.index(option.role))),
        illegal_by=dict(illegal.most_common()),
        refused={
            role: next(part.refused[role] for part in parts if role in part.refused)
            for role in roles
            if any(role in part.refused for part in parts)
            and all(option.role is not role for option in found)
        },
        beaten=sum(part.beaten for part in parts),
        slowest_tpot_s=min(part.slowest_tpot_s for part in parts),
        slowest_ttft_s=min(part.slowest_ttft_s for part in parts),
        curves=tuple(curve for part in parts for curve in part.curves),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Way:
    """An instance before its role and its batch are chosen."""

    site: PoolSite
    iteration: Iteration
    budget: Budget
    page_tokens: int | None
    running_N: Floats
    """Sequences of one that are priced, 1 first; none where the longest request has no room."""
    decode_s_N: Floats
    """Seconds of a step without prompts with them."""
    is_first: bool
    """Of the budgets, which do not matter to who reads no prompts."""

    def prompt(self, demand: Demand) -> PromptTime:
        """Return a prompt alone, its latency as a client sees it."""
        found = prompt_time(self.iteration, demand, step_tokens=self.budget.tokens)
        client = client_of(self.iteration.engine)
        late_s = STEPS_BEFORE_TOKEN * float(self.decode_s_N[0]) / self.iteration.tokens_per_step
        return replace(found, latency_s=found.latency_s + late_s + client.overhead_s)

    def suits(self, role: Role) -> bool:
        """Whether the way is worth trying in a role."""
        if self.iteration.exchange in UNFIT.get(role, ()):
            return False
        return self.is_first or role is not Role.DECODE

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
            site=self.site,
            role=role,
            degrees=self.iteration.degrees,
            iteration=self.iteration,
            running=running,
            rate_per_s=rate_per_s,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            kv_tokens=_cache(self.iteration, self.site, self.budget, demand, running=running),
            step_tokens=self.budget.tokens,
            is_chunked=self.budget.is_chunked,
            page_tokens=self.page_tokens,
        )


def _ways(
    sites: tuple[PoolSite, ...],
    plain: tuple[Decoder, Formats, Engine],
    choices: Choices,
    demand: Demand,
) -> Iterator[_Way]:
    decoder, formats, engine = plain
    for site in sites:
        needs_stages = True
        for degrees in degrees_of(site.pool, decoder, has_copies=choices.copies.is_launched):
            is_slow = has_slow_links(site.machine.sheet, site.pool)
            if degrees.pipeline > 1 and not (is_slow or needs_stages):
                break
            plain_way = Iteration(
                decoder=decoder,
                formats=formats,
                degrees=degrees,
                engine=engine,
                machine=site.machine,
            )
            for iteration, (drafting, exchange, overlaps) in product(
                _with_copies(plain_way, site.pool, choices), choices.variants(degrees)
            ):
                varied = replace(
                    iteration, drafting=drafting, exchange=exchange, two_batch_overlap=overlaps
                )
                for way in _budgeted(site, varied, choices, demand):
                    has_room = len(way.running_N) > 0 and degrees.devices <= site.pool.domain
                    needs_stages = needs_stages and not has_room
                    yield way


def _with_copies(iteration: Iteration, pool: Pool, choices: Choices) -> Iterator[Iteration]:
    """Yield an instance with the numbers of copies of experts that are worth a try."""
    degrees, own = iteration.degrees, iteration.decoder.experts
    if own is None:
        yield iteration
        return
    ranks = degrees.expert * degrees.moe_tensor
    nodes = nodes_of(ranks, devices_per_node=pool.devices_per_node)
    for redundant, loads in choices.copies.tried(own, ranks=degrees.expert, nodes=nodes):
        yield replace(iteration, redundant_experts=redundant, loads=loads)


def _budgeted(
    site: PoolSite, iteration: Iteration, choices: Choices, demand: Demand
) -> Iterator[_Way]:
    priced: dict[int, tuple[Floats, Floats]] = {}
    for number, budget in enumerate(choices.budgets):
        cache = _cache(iteration, site, budget, demand, running=1)
        most = _most_held(iteration, site, budget, demand)
        longest = demand.longest_input + demand.longest_output
        if cache < longest or not _holds_whole(iteration, site, budget, demand, running=1):
            priced[most] = np.zeros(0), np.zeros(0)
        elif most not in priced or not len(priced[most][0]):
            running_N = np.unique(np.round(np.geomspace(1.0, most, BATCHES))).astype(np.float64)
            priced[most] = running_N, step_seconds(iteration, running_N, demand)
        running_N, decode_s_N = priced[most]
        yield _Way(
            site=site,
            iteration=iteration,
            budget=budget,
            page_tokens=choices.page_of_pool.get(site.pool.name),
            running_N=running_N,
            decode_s_N=decode_s_N,
            is_first=number == 0,
        )


def _cache(
    iteration: Iteration, site: PoolSite, budget: Budget, demand: Demand, *, running: int
) -> float:
    """Tokens of a rank's cache beside what steps with so many sequences take of memory."""
    return cache_tokens(
        iteration,
        memory_bytes=site.memory_bytes,
        step_tokens=budget.tokens,
        running=running,
        request_tokens=demand.held_tokens,
    )


def _holds_whole(
    iteration: Iteration, site: PoolSite, budget: Budget, demand: Demand, *, running: int
) -> bool:
    """Whether a request of the longest length has room, where the engine wants that."""
    if not rule_of(iteration.engine).wants_whole_length:
        return True
    held = cache_tokens(
        iteration,
        memory_bytes=site.memory_bytes,
        step_tokens=budget.tokens,
        running=running,
        request_tokens=float(demand.most_tokens),
    )
    return held >= demand.most_tokens


def _most_held(iteration: Iteration, site: PoolSite, budget: Budget, demand: Demand) -> int:
    """Most sequences that fit into what the steps of so many leave of memory; 1 at least."""
    low, high = 1, min(MOST_RUNNING, demand.most_at_once) + 1
    while high - low > 1:
        middle = (low + high) // 2
        cache = _cache(iteration, site, budget, demand, running=middle)
        has_room = most_running(cache, demand, engine=iteration.engine) >= middle
        has_room = has_room and _holds_whole(iteration, site, budget, demand, running=middle)
        low, high = (middle, high) if has_room else (low, middle)
    return low


def memory_of(option: Option, demand: Demand) -> int:
    """Bytes of one device: weights, the cache of the sequences that run, and what steps take."""
    iteration = option.iteration
    held = min(option.running * demand.held_tokens, option.kv_tokens)
    each = held_kv_bytes_per_token(iteration)
    steps = reserve_of(iteration, step_tokens=option.step_tokens, running=option.running)
    return int(held_weight_bytes(iteration) + held * each + steps.total)


def step_seconds(iteration: Iteration, running_N: Floats, demand: Demand) -> Floats:
    """Seconds of a decode step with so many sequences, as long as running ones are on average."""
    return step_s(iteration, running_N, np.full_like(running_N, demand.past_tokens))


def _of_role(
    way: _Way, role: Role, prompt: PromptTime, demand: Demand
) -> tuple[tuple[Option, ...], str, Curve | None]:
    """Return a way in a role, at the batches worth trying; else what stands in its way.

    Beside it all its batches, where it answers requests that were priced.
    """
    data = way.iteration.degrees.attention_data
    if role is not Role.DECODE and prompt.latency_s > demand.ttft_s:
        return (), SLOW_PROMPT, None
    if role is Role.PREFILL:
        first_s, rate = prompt.latency_s, data / prompt.busy_s
        cache = _cache(way.iteration, way.site, way.budget, demand, running=PREFILL_PLACES)
        most = min(PREFILL_PLACES, demand.most_at_once)
        places = int(np.clip(cache // demand.longest_input, 1.0, most))
        alone = way.option(
            role, demand, running=places, rate_per_s=rate, ttft_s=first_s, tpot_s=0.0
        )
        return (alone,), "", None
    if role is Role.DECODE:
        return _of_decode(way, demand)
    priced_s = token_seconds(
        way.iteration,
        way.running_N,
        demand,
        step_tokens=way.budget.tokens,
        decode_s_N=way.decode_s_N,
    )
    return _answering(way, role, priced_s, demand, ttft_s=prompt.latency_s)


def _of_decode(way: _Way, demand: Demand) -> tuple[tuple[Option, ...], str, Curve | None]:
    priced_s = way.decode_s_N / way.iteration.tokens_per_step
    return _answering(way, Role.DECODE, priced_s, demand, ttft_s=0.0)


def _answering(
    way: _Way, role: Role, priced_s: Floats, demand: Demand, *, ttft_s: float
) -> tuple[tuple[Option, ...], str, Curve | None]:
    """Return a way that answers, by what a token takes at each number of sequences."""
    data = way.iteration.degrees.attention_data
    running_N = np.arange(1.0, way.running_N[-1] + 1.0)
    tpot_s_N = np.interp(running_N, way.running_N, np.minimum(priced_s, NEVER_S))
    rate_N = data * running_N / (demand.output_tokens * tpot_s_N)

    def at(place: int) -> Option:
        return way.option(
            role,
            demand,
            running=int(running_N[place]),
            rate_per_s=float(rate_N[place]),
            ttft_s=ttft_s,
            tpot_s=float(tpot_s_N[place]),
        )

    allowed = np.flatnonzero(tpot_s_N <= min(demand.tpot_s, LONGEST_S))
    if not len(allowed):
        slow = Curve(option=at(0), running_N=way.running_N, tpot_s_N=priced_s)
        return (), SLOW_TOKEN, slow
    best = allowed[rate_N[allowed].argmax()]
    chosen = {
        int(allowed[np.searchsorted(running_N[allowed], share * running_N[best])])
        for share in FRACTIONS
    }
    made = tuple(at(place) for place in sorted(chosen))
    return made, "", Curve(option=made[0], running_N=way.running_N, tpot_s_N=priced_s)


def most_running(cache: float, demand: Demand, *, engine: Engine) -> float:
    """Sequences that memory has room for but once in a hundred looks; 1 at least.

    Of a closed loop no more than there are, so that no batch and no graph is made for others. What
    they take is whole answers where the engine reserves them, else what they have by then.

    Args:
        cache: tokens of a rank.
        demand: the traffic.
        engine: that lets them in.
    """
    fitting = (
        _fitting(demand.reserved_N, cache)
        if TRAITS[engine].reserves_answers
        else _fitting(demand.grown_N, (1.0 - WATERMARK_RATIO) * cache)
    )
    return min(fitting, float(demand.most_at_once))


def _fitting(taken_N: Floats, cache: float) -> float:
    return float(max(int(np.searchsorted(taken_N, cache * (1.0 + 1e-9), side="right")), 1))
