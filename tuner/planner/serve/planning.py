"""From a deployment's spec to its plan: options, integer programs, simulation, certificate.

For each mode the integer program chooses instances for the demanded rate; their traffic is played;
where waiting breaks a target the program is asked for more spare capacity, by bisection, until it
holds. The best mode by the goal's objective is the plan, the others are its alternatives.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, get_args

import numpy as np

from solvers.instances.problem import InstancePlan
from solvers.result import Outcome, Status
from tuner.costs.serving.decoder import Decoder, Formats, decoder_of
from tuner.costs.serving.engine import TRAITS, Engine
from tuner.planner.serve.demand import Demand, demand_of
from tuner.planner.serve.options import (
    Option,
    Options,
    PoolSite,
    memory_of,
    options_of,
    step_seconds,
)
from tuner.planner.serve.playing import Group, Played, latency_of, played_apart, played_together
from tuner.planner.serve.program import (
    ROLES,
    Mode,
    Program,
    Solved,
    cards_bytes_per_s,
    program_of,
    request_bytes,
    solve,
)
from tuner.serve_plan import (
    Handover,
    Instances,
    Role,
    ServeAlternative,
    ServeCertificate,
    ServeDecision,
    ServePlan,
    ServePrediction,
    ServeProvenance,
    ServeRelaxation,
    ServeSpace,
    ServeUnlaunchable,
)
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.read import ServeSpec

MOST_SPARE: Final = 4.0
SPARE_STEPS: Final = 5
PLAYED_BAND: Final = (0.75, 1.4)
"""Measured over predicted: nine of ten published launches on Hopper lie within it
(README, accuracy of serving)."""
HANDOVER_S: Final = 0.02
"""Of a handover beside its bytes: router, page tables, first look of the decode engine's scheduler;
what published disaggregated runs show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How hard to look."""

    time_limit_s: float = 60.0
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Found:
    """One mode's answer."""

    solved: Solved
    groups: tuple[Group, ...]
    played: Played
    spare_ratio: float
    missed: tuple[str, ...]

    @property
    def devices(self) -> int:
        """Of all instances."""
        return sum(group.count * group.option.devices for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Question:
    """Everything that a mode is answered from."""

    spec: ServeSpec
    sites: tuple[PoolSite, ...]
    demand: Demand
    options: Options
    decoder: Decoder
    formats: Formats
    settings: Settings


def make_serve_plan(
    spec: ServeSpec,
    sites: tuple[PoolSite, ...],
    *,
    settings: Settings,
    provenance: ServeProvenance,
) -> ServePlan:
    """Plan a deployment.

    Raises:
        SpecError: the traffic cannot be read.
    """
    started_s = settings.clock()
    question = _question(spec, sites, settings)
    modes = [mode for mode in get_args(Mode) if mode in spec.goal.modes]
    found = [one for mode in modes if (one := _answer(question, mode)) is not None]
    fitting = [one for one in found if not one.missed]
    solve_s = settings.clock() - started_s
    notes = (*provenance.notes, *_notes(question))
    provenance = provenance.model_copy(update={"notes": notes})
    if not fitting:
        return _nothing(question, found, solve_s=solve_s, provenance=provenance)
    order = sorted(fitting, key=lambda one: _rank(one, spec.goal))
    best = order[0]
    return ServePlan(
        model=spec.model,
        cluster=spec.cluster,
        goal=spec.goal,
        emit=spec.emit,
        decision=_decision(best, question),
        predicted=_prediction(best, question),
        certificate=_certificate(best, question, found, solve_s=solve_s),
        binding_constraint=_binding(best, question),
        alternatives=tuple(_alternatives(best, order[1:], question)),
        unlaunchable=tuple(_unlaunchable(question)),
        provenance=provenance,
    )


def _question(spec: ServeSpec, sites: tuple[PoolSite, ...], settings: Settings) -> _Question:
    decoder, formats = decoder_of(spec.model), formats_of_goal(spec.goal)
    longest = min(spec.goal.max_model_len or spec.model.max_position, spec.model.max_position)
    demand = demand_of(spec.goal, longest=longest)
    roles = tuple(
        dict.fromkeys(
            role for mode in get_args(Mode) if mode in spec.goal.modes for role in ROLES[mode]
        )
    )
    options = options_of(
        sites,
        decoder=decoder,
        formats=formats,
        engine=Engine(spec.goal.engine.name),
        demand=demand,
        roles=roles,
    )
    return _Question(
        spec=spec,
        sites=sites,
        demand=demand,
        options=options,
        decoder=decoder,
        formats=formats,
        settings=settings,
    )


def formats_of_goal(goal: ServeGoal) -> Formats:
    """Return storage formats: everything quantised alike, but nvfp4 leaves attention in bf16."""
    own = goal.quantization
    attention = "bf16" if own == "nvfp4" else own
    return Formats(
        attention=attention, output=attention, ffn=own, experts=own, kv=goal.kv_cache_dtype
    )


def _answer(question: _Question, mode: Mode) -> _Found | None:
    """Find the least spare capacity with which every target holds when the traffic is played."""
    spec, least = question.spec, question.spec.goal.spare_ratio
    found = _tried(question, mode, least)
    if found is None or not found.missed:
        return found
    high = max(0.25, 2.0 * least)
    best = None
    while best is None and high <= MOST_SPARE:
        more = _tried(question, mode, high)
        if more is None:
            break
        found = more
        if not more.missed:
            best = more
        else:
            least, high = high, 2.0 * high
    if best is None:
        return found
    low = least
    for _ in range(SPARE_STEPS):
        middle = 0.5 * (low + best.spare_ratio)
        less = _tried(question, mode, middle)
        if less is not None and not less.missed:
            best = less
        else:
            low = middle
    del spec
    return best


def _tried(question: _Question, mode: Mode, spare_ratio: float) -> _Found | None:
    program = program_of(
        mode,
        question.options.options,
        sites=question.sites,
        cluster=question.spec.cluster,
        goal=question.spec.goal,
        demand=question.demand,
        spare_ratio=spare_ratio,
    )
    if program is None:
        return None
    solved = solve(program, time_limit_s=question.settings.time_limit_s / 4.0)
    if solved.outcome.solution is None:
        return None
    groups = _groups(program, solved.outcome.solution)
    played = _play(question, mode, groups)
    return _Found(
        solved=solved,
        groups=groups,
        played=played,
        spare_ratio=spare_ratio,
        missed=played.missed(question.spec.goal.slo),
    )


def _groups(program: Program, plan: InstancePlan) -> tuple[Group, ...]:
    return tuple(
        Group(option=program.options[column], count=count)
        for column, count in enumerate(plan.count_J)
        if count
    )


def _play(question: _Question, mode: Mode, groups: Sequence[Group]) -> Played:
    goal, demand = question.spec.goal, question.demand
    if mode == "aggregated":
        return played_together(groups, goal=goal, demand=demand)
    prefill = _fused([group for group in groups if group.option.role is Role.PREFILL])
    decode = _fused([group for group in groups if group.option.role is Role.DECODE])
    return played_apart(
        prefill,
        decode,
        handover_s=_handover_s(prefill.option, decode.option, question),
        goal=goal,
        demand=demand,
    )


def _fused(groups: Sequence[Group]) -> Group:
    """Stand the slowest kind for all of a role, as many of them as serve what all do."""
    slowest = min(groups, key=lambda group: group.option.rate_per_s / group.option.devices)
    rate = sum(group.rate_per_s for group in groups)
    return Group(option=slowest.option, count=max(1, int(rate / slowest.option.rate_per_s)))


def _handover_s(sender: Option, receiver: Option, question: _Question) -> float:
    """Seconds of moving a mean prompt's cache over the cards of both instances."""
    moved = request_bytes(sender, question.demand)
    rates = [
        2.0 * cards_bytes_per_s(option.site) / option.site.pool.num_devices * option.devices
        for option in (sender, receiver)
    ]
    pools = {sender.site.pool.name, receiver.site.pool.name}
    rates += [link.bandwidth for link in question.spec.cluster.links if set(link.between) == pools]
    return HANDOVER_S + moved / min(rates)


def _rank(found: _Found, goal: ServeGoal) -> tuple[float, float]:
    price = sum(
        group.count * group.option.devices * (group.option.site.pool.price_per_device_hour or 0.0)
        for group in found.groups
    )
    if goal.objective == "cost":
        return price, float(found.devices)
    if goal.objective == "devices":
        return float(found.devices), price
    goodput = found.played.requests_per_s * found.played.met_ratio
    return -goodput / found.devices, price


def _decision(found: _Found, question: _Question) -> ServeDecision:
    groups = found.groups
    handovers = [
        _handover(sender.option, receiver.option, question)
        for sender in groups
        if sender.option.role is Role.PREFILL
        for receiver in groups
        if receiver.option.role is Role.DECODE
    ]
    return ServeDecision(
        mode=found.solved.program.mode,
        instances=tuple(_instances(group, question) for group in groups),
        handovers=tuple(handovers),
    )


def _handover(sender: Option, receiver: Option, question: _Question) -> Handover:
    return Handover(
        from_pool=sender.site.pool.name,
        to_pool=receiver.site.pool.name,
        connector="mooncake" if question.spec.goal.engine.name == "sglang" else "nixl",
        path="device" if sender.site.pool.name == receiver.site.pool.name else "host",
        request_bytes=int(request_bytes(sender, question.demand)),
        seconds=_handover_s(sender, receiver, question),
    )


def _instances(group: Group, question: _Question) -> Instances:
    option, degrees = group.option, group.option.degrees
    traits = TRAITS[option.iteration.engine]
    has_experts = question.decoder.experts is not None
    return Instances(
        role=option.role,
        pool=option.site.pool.name,
        count=group.count,
        devices=option.devices,
        attention_tp=degrees.attention_tensor,
        attention_dp=degrees.attention_data,
        moe_tp=degrees.moe_tensor if has_experts else 1,
        ep=degrees.expert if has_experts else 1,
        pp=degrees.pipeline,
        max_batch=option.running,
        max_batched_tokens=traits.step_tokens,
        chunked_prefill=traits.batching.value == "chunked",
        a2a_backend="allgather" if degrees.attention_data > 1 else "none",
        kv_tokens=int(option.kv_tokens * degrees.attention_data),
    )


def _prediction(found: _Found, question: _Question) -> ServePrediction:
    played, demand = found.played, question.demand
    ttft, tpot = latency_of(played.ttft_s_R), latency_of(played.tpot_s_R)
    low, high = PLAYED_BAND
    busiest = max(
        (group for group in found.groups if group.option.role is not Role.PREFILL),
        key=lambda group: group.option.tpot_s,
    )
    price = _price_per_hour(found)
    return ServePrediction(
        ttft_s=ttft,
        ttft_s_band=(low * ttft.mean, high * ttft.mean),
        tpot_s=tpot,
        tpot_s_band=(low * tpot.mean, high * tpot.mean),
        goodput_per_device=played.requests_per_s * played.met_ratio / found.devices,
        requests_per_s=played.requests_per_s,
        output_tokens_per_s=played.output_tokens_per_s,
        utilisation_ratio={
            _named(group): min(1.0, demand.rate_per_s / _role_rate(found, group.option.role))
            for group in found.groups
        },
        memory_bytes={_named(group): memory_of(group.option, demand) for group in found.groups},
        cost_per_hour=price,
        breakdown_s=_breakdown(busiest.option, demand),
    )


def _price_per_hour(found: _Found) -> float | None:
    prices = [group.option.site.pool.price_per_device_hour for group in found.groups]
    if any(price is None for price in prices):
        return None
    return sum(
        group.count * group.option.devices * (price or 0.0)
        for group, price in zip(found.groups, prices, strict=True)
    )


def _named(group: Group) -> str:
    degrees = group.option.degrees
    shape = f"tp{degrees.attention_tensor}dp{degrees.attention_data}"
    return f"{group.option.role.value}@{group.option.site.pool.name}/{shape}"


def _role_rate(found: _Found, role: Role) -> float:
    return sum(group.rate_per_s for group in found.groups if group.option.role is role)


def _breakdown(option: Option, demand: Demand) -> dict[str, float]:
    running_N = np.array([float(option.running)])
    iteration = option.iteration
    parts = {name: float(seconds[0]) for name, seconds in iteration.linear_parts(running_N).items()}
    whole = float(step_seconds(iteration, running_N, demand)[0])
    past_N = np.array([demand.input_tokens + 0.5 * demand.output_tokens])
    parts["attention"] = float(iteration.decode_s(running_N, past_N)[0])
    parts["head"] = float(iteration.head_s(running_N)[0])
    parts["scheduler"] = iteration.scheduler_s
    parts["clocks"] = whole - sum(parts.values())
    return {name: seconds for name, seconds in parts.items() if abs(seconds) > 1e-12}


def _certificate(
    best: _Found, question: _Question, found: Sequence[_Found], *, solve_s: float
) -> ServeCertificate:
    outcome: Outcome[InstancePlan] = best.solved.outcome
    near = sum(
        1
        for other in found
        if other is not best
        and not other.missed
        and abs(other.devices / best.devices - 1.0) <= PLAYED_BAND[1] - 1.0
    )
    return ServeCertificate(
        status="optimal" if outcome.status is Status.OPTIMAL else "feasible",
        objective=outcome.objective,
        bound=outcome.bound,
        gap_ratio=outcome.gap_ratio,
        space=ServeSpace(
            priced=len(question.options.options),
            bounded=0,
            illegal=question.options.illegal,
        ),
        within_band=near,
        solve_s=solve_s,
        method=outcome.method,
    )


def _binding(best: _Found, question: _Question) -> str:
    slo, played = question.spec.goal.slo, best.played
    tight = [
        (value / limit, f"{name} {kind}")
        for name, targets, values in (
            ("ttft", slo.ttft, played.ttft_s_R),
            ("tpot", slo.tpot, played.tpot_s_R),
        )
        for kind in ("mean", "p50", "p90", "p99")
        if (limit := getattr(targets, kind)) is not None and len(values)
        for value in [getattr(latency_of(values), kind)]
    ]
    if best.spare_ratio > question.spec.goal.spare_ratio:
        return f"waiting: {best.spare_ratio:.0%} of spare capacity keeps {max(tight)[1]}"
    if tight and max(tight)[0] > 0.85:
        return max(tight)[1]
    return "throughput: the traffic's rate"


def _alternatives(
    best: _Found, others: Sequence[_Found], question: _Question
) -> Iterator[ServeAlternative]:
    for other in others:
        yield ServeAlternative(
            decision=_decision(other, question),
            predicted=_prediction(other, question),
            within_band=abs(other.devices / best.devices - 1.0) <= PLAYED_BAND[1] - 1.0,
            lost_by=f"{other.devices} devices, the chosen one takes {best.devices}",
        )


def _unlaunchable(question: _Question) -> Iterator[ServeUnlaunchable]:
    if "attention_expert" in question.spec.goal.modes and question.decoder.experts is not None:
        yield ServeUnlaunchable(
            feature="attention and experts on devices of their own: no released engine launches"
            " it; not priced",
            gain_ratio=0.0,
        )


def _notes(question: _Question) -> Iterator[str]:
    for site in question.sites:
        if site.machine.estimated:
            named = ", ".join(sorted(site.machine.estimated))
            yield f"{site.pool.name}: from the datasheet: {named}"
    if question.demand.concurrency is not None:
        yield (
            f"a closed loop of {question.demand.concurrency} within its targets asks for"
            f" {question.demand.rate_per_s:.3g} requests/s"
        )


def _nothing(
    question: _Question,
    found: Sequence[_Found],
    *,
    solve_s: float,
    provenance: ServeProvenance,
) -> ServePlan:
    return ServePlan(
        model=question.spec.model,
        cluster=question.spec.cluster,
        goal=question.spec.goal,
        emit=question.spec.emit,
        decision=None,
        predicted=None,
        certificate=ServeCertificate(
            status="infeasible",
            objective=None,
            bound=None,
            gap_ratio=1.0,
            space=ServeSpace(
                priced=len(question.options.options),
                bounded=0,
                illegal=question.options.illegal,
            ),
            within_band=0,
            solve_s=solve_s,
            method="options",
        ),
        binding_constraint=_why_nothing(question, found),
        relaxations=tuple(_relaxations(question)),
        provenance=provenance,
    )


def _why_nothing(question: _Question, found: Sequence[_Found]) -> str:
    options, demand = question.options, question.demand
    if options.slowest_tpot_s == float("inf"):
        return (
            f"memory: no way to split {question.spec.model.name} leaves room for one request of"
            f" {demand.longest_input + demand.longest_output} tokens"
        )
    if options.slowest_tpot_s > demand.tpot_s:
        return f"tpot: one request alone takes {options.slowest_tpot_s * 1e3:.3g} ms a token"
    if options.slowest_ttft_s > demand.ttft_s:
        return f"ttft: one prompt alone takes {options.slowest_ttft_s * 1e3:.4g} ms"
    if found:
        return f"{found[0].missed[0]}, with {MOST_SPARE:.0%} of spare capacity at most"
    return f"devices: {demand.rate_per_s:.3g} requests/s are more than all pools serve"


def _relaxations(question: _Question) -> Iterator[ServeRelaxation]:
    """Solve again with one thing given up."""
    goal, cluster = question.spec.goal, question.spec.cluster
    twice = cluster.model_copy(
        update={
            "pools": tuple(
                pool.model_copy(update={"nodes": 2 * pool.nodes}) for pool in cluster.pools
            )
        }
    )
    slow = goal.model_copy(update={"slo": _wider(goal, 2.0)})
    changes = {
        "nodes": ("twice the nodes of every pool", replace_spec(question.spec, cluster=twice)),
        "slo": ("twice the time for every target", replace_spec(question.spec, goal=slow)),
    }
    for limit, (change, spec) in changes.items():
        sites = tuple(
            replace(site, pool=pool)
            for site, pool in zip(question.sites, spec.cluster.pools, strict=True)
        )
        other = _question(spec, sites, question.settings)
        modes = [mode for mode in get_args(Mode) if mode in goal.modes]
        found = [one for mode in modes if (one := _answer(other, mode)) and not one.missed]
        if found:
            best = min(found, key=lambda one: one.devices)
            yield ServeRelaxation(limit=limit, change=change, decision=_decision(best, other))


def replace_spec(spec: ServeSpec, **changes: object) -> ServeSpec:
    """Return the spec with some fields changed."""
    return replace(spec, **changes)  # type: ignore[arg-type]  # callers name fields of the spec


def _wider(goal: ServeGoal, factor: float) -> object:
    def scaled(targets: object) -> object:
        values = {
            kind: None if (limit := getattr(targets, kind)) is None else factor * limit
            for kind in ("mean", "p50", "p90", "p99")
        }
        return type(targets)(**values)

    return type(goal.slo)(ttft=scaled(goal.slo.ttft), tpot=scaled(goal.slo.tpot))
