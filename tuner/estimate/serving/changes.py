"""A serving launch with one thing changed: a degree, the experts' split, the batch, memory.

    twice or half the tensor or data ranks of attention    other devices; where the launch does not
                                                           fit also 4, 8, ... times
    a factor of two from tensor to data ranks, or back     the same devices
    all devices data ranks, or all tensor ranks            the same devices
    experts split by EP, or by TP                          the same devices
    half the context ranks of the cache                    the same devices; where the cache limits
                                                           the launch also twice, or all
    twice or half the batch, or all that memory holds      the same devices
    twice or half the tokens of a step with prompts        the same devices
    another all-to-all, or two-batch overlap               the same devices
    one redundant expert more or fewer on every rank       the same devices, with recorded expert
                                                           loads
    more or fewer drafts, or none                          the same devices, where the spec states
                                                           the acceptance
    chunked prefill                                        the same devices
    the largest share of memory that fits, or an fp8 cache where the cache limits the launch

A launch that does not fit is also tried with stages of a pipeline, without drafts, with half, a
quarter, ... of its tokens of a step or of its sequences, and with the longest requests that it has
room for. The precision of weights stays, and so does the split of experts (EP or TP) over the new
ranks. A change beats the
launch if it misses fewer SLO targets; or misses as many and has more goodput per device, by more
than the accuracy of ratios of two layouts (`tie_ratio`, tuner/search/serve/to_plan.py); or has
equal goodput and requests (TTFT + (O - 1) TPOT) shorter by more than that. The best has the fewest
missed targets, then the most goodput per device, then the shortest requests. Ratios to the launch's
latencies have bands where only the degrees differ, as in published comparisons.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tuner.catalog.serve_rules.afd import afd_refusals
from tuner.catalog.serve_rules.rules import group_refusals
from tuner.config.serve import Role
from tuner.costs.serve.bands import ratio_bands
from tuner.costs.serve.engine import InstanceDegrees
from tuner.engines.reading.serve_launch import InstanceKnobs, ServingLaunch
from tuner.engines.registry import engine_file
from tuner.engines.serving.releases import ENGINE_TRAITS, release_on
from tuner.estimate.serving.instance import (
    EstimateInputs,
    applied_share,
    largest_length,
    largest_share,
    misfit_reason,
    price_option,
    simulate_load,
    to_plan_instances,
    with_launch,
)
from tuner.estimate.serving.records import ServingChange, ServingLoad
from tuner.search.change import Change, first_solution
from tuner.search.serve.choices import BUDGETS
from tuner.search.serve.expert_copies import MOST_RATIO
from tuner.search.serve.instances import to_instances
from tuner.search.serve.options import Option, most_running
from tuner.search.serve.to_plan import tie_ratio
from tuner.spec.serving.expert_slots import are_even, fewest_redundant

LaunchChange = Change[ServingLaunch]


def price_changes(inputs: EstimateInputs, load: ServingLoad | None) -> tuple[ServingChange, ...]:
    """Price every change of one thing that fits and can be launched, the best first.

    Args:
        inputs: the launch and its traffic.
        load: of the launch as it is; None where it does not fit.
    """
    if inputs.launch.ffn_devices:
        return ()  # AFD unit sizes are chosen together, by planning.
    now = inputs.launch.setting
    # What a release refuses of the launch as it is, no change of something else has to mend.
    known = frozenset(manifest_refusals(inputs, price_option(inputs, now), now))
    fits_now = load is not None
    every = [*_neighbours(inputs, fits_now=fits_now)]
    every += () if fits_now else _smaller(inputs, now)
    every += _memory(inputs, fits_now=fits_now)
    changes = [
        made
        for change in {change.words: change for change in every}.values()
        if (made := _priced(inputs, change, load=load, known=known)) is not None
    ]
    return tuple(sorted(changes, key=lambda change: _rank(inputs, change.load)))


def manifest_refusals(
    inputs: EstimateInputs, option: Option, setting: InstanceKnobs
) -> tuple[str, ...]:
    """Return the release's refusals of an instance."""
    engine = release_on(inputs.goal, inputs.serving_pool.pool)
    sheet = inputs.serving_pool.machine.sheet
    groups = [to_plan_instances(inputs, option, setting)]
    lines: list[str] = []
    if inputs.launch.ffn_devices:
        groups += to_instances(option, count=inputs.instances)[1:]
        if engine.afd is None:
            lines.append("it has no attention-FFN disaggregation; vllm 0.30.0+afd does")
        else:
            pools = {inputs.serving_pool.pool.name: sheet.generation}
            lines += afd_refusals(engine.afd, groups, generations=pools)
    for group in groups:
        lines += group_refusals(
            engine,
            group,
            model=inputs.spec.model,
            goal=inputs.goal,
            devices_per_node=inputs.serving_pool.pool.devices_per_node,
            sheet=sheet,
        )
    return tuple(f"{engine.title}: {line}" for line in lines)


def _moved(
    now: InstanceKnobs, limit: str, unit: str = "", *, before: int | None = None, **knobs: Any
) -> LaunchChange:
    """Change knobs of the instances; the words are about the first."""
    name, after = next(iter(knobs.items()))
    was = getattr(now, name) if before is None else before
    return _set(limit, f"{limit} {was} -> {after}{unit}", **knobs)


def _set(limit: str, words: str, **knobs: Any) -> LaunchChange:
    return Change(limit=limit, words=words, apply=partial(_with_knobs, **knobs))


def _with_knobs(launch: ServingLaunch, **knobs: Any) -> ServingLaunch:
    return replace(launch, setting=replace(launch.setting, **knobs))


def _is_cache_bound(inputs: EstimateInputs) -> bool:
    """Return whether more sequences would run at once if the cache had room for them."""
    launch, demand = inputs.launch, inputs.demand
    if launch.role is Role.PREFILL:
        return False
    option = price_option(inputs, launch.setting)
    fitting = most_running(option.kv_tokens, demand, traits=option.iteration.traits)
    ranks = inputs.instances * launch.setting.degrees.attention_data
    return fitting < min(option.running, math.ceil(demand.most_at_once / ranks))


def _memory(inputs: EstimateInputs, *, fits_now: bool) -> Iterator[LaunchChange]:
    """Yield another share of memory, a smaller type of the cache, and shorter requests."""
    if fits_now and not _is_cache_bound(inputs):
        return
    launch, length = inputs.launch, largest_length(inputs)
    share, now, longest = largest_share(inputs), applied_share(inputs), inputs.demand.most_tokens
    if share is not None and f"{share:.3g}" != f"{now:.3g}":
        yield Change(
            limit="memory",
            words=f"memory share {now:.3g} -> {share:.3g}",
            apply=partial(replace, memory_ratio=share, cache_bytes=None),
        )
    if launch.kv_cache_dtype == "bf16":
        smaller = partial(replace, kv_cache_dtype="fp8")
        yield Change(limit="cache", words="cache bf16 -> fp8", apply=smaller)
    if not fits_now and inputs.longest_tokens <= length < longest:
        words = f"longest request {longest} -> {length} tokens"
        yield Change(limit="length", words=words, apply=partial(replace, max_model_len=length))


def _smaller(inputs: EstimateInputs, now: InstanceKnobs) -> Iterator[LaunchChange]:
    """Yield more stages, no drafts, and the largest steps and batches that fit."""
    degrees, max_devices = now.degrees, inputs.serving_pool.pool.num_devices // inputs.instances
    stages = 2 * degrees.pipeline
    while stages * degrees.devices // degrees.pipeline <= max_devices:
        more = replace(degrees, pipeline=stages)
        yield _set("degrees", _described(now, replace(now, degrees=more)), degrees=more)
        stages *= 2
    if now.draft_tokens:
        yield _moved(now, "drafts", draft_tokens=0)

    def solve(change: LaunchChange) -> LaunchChange | None:
        setting = change.apply(inputs.launch).setting
        return None if misfit_reason(inputs, price_option(inputs, setting), setting) else change

    steps = [now.step_tokens >> by for by in range(2, 8) if now.step_tokens >> by >= BUDGETS[0]]
    batches = [now.running >> by for by in range(1, 11) if now.running >> by]
    ladders = (
        (_moved(now, "step", " tokens", step_tokens=tokens) for tokens in steps),
        (_moved(now, "batch", " sequences a rank", running=running) for running in batches),
    )
    yield from filter(None, (first_solution(ladder, solve) for ladder in ladders))


def _neighbours(inputs: EstimateInputs, *, fits_now: bool) -> Iterator[LaunchChange]:
    """Yield every change of a knob that keeps what the launch is for."""
    now = inputs.launch.setting
    pairs = [*_pairs(now.degrees)]
    if not fits_now:
        pairs += _larger(now.degrees, max_devices=inputs.serving_pool.pool.num_devices)
    candidates = (*_attention(now.degrees, pairs), *_experts(now.degrees))
    if inputs.decoder.experts is None:
        candidates = tuple(replace(degrees, expert=1, moe_tensor=1) for degrees in candidates)
    candidates = (*candidates, *_contexts(inputs, now.degrees, fits_now=fits_now))
    for degrees in dict.fromkeys(_shared(inputs, candidate) for candidate in candidates):
        copies = _even_copies(inputs, degrees)
        changed = replace(now, degrees=degrees, redundant_experts=copies)
        if degrees != now.degrees and _is_legal(inputs, changed):
            words = _described(now, changed)
            yield _set("degrees", words, degrees=degrees, redundant_experts=copies)
    yield from _steps(inputs, now)
    yield from _copies(inputs, now)
    if inputs.launch.role is Role.PREFILL:
        return
    yield from _drafts(inputs, now)
    # A batch beyond what memory holds, or beyond the closed loop's concurrency, has no effect.
    option = price_option(inputs, now)
    max_running = int(most_running(option.kv_tokens, inputs.demand, traits=option.iteration.traits))
    concurrency = inputs.demand.concurrency
    if concurrency is not None:
        max_running = min(
            max_running, math.ceil(concurrency / (inputs.instances * now.degrees.attention_data))
        )
    used = min(now.running, max_running)
    for running in dict.fromkeys((min(2 * used, max_running), max_running, used // 2)):
        if running not in (0, used):
            yield _moved(now, "batch", " sequences a rank", before=used, running=running)


def _drafts(inputs: EstimateInputs, now: InstanceKnobs) -> Iterator[LaunchChange]:
    """Yield more, fewer and no drafted tokens, where their acceptance is stated."""
    speculative = inputs.goal.speculative
    if speculative is None:
        return
    for tokens in range(max(now.draft_tokens, speculative.draft_tokens) + 1):
        if tokens != now.draft_tokens:
            yield _moved(now, "drafts", draft_tokens=tokens)


def _even_copies(inputs: EstimateInputs, degrees: InstanceDegrees) -> int:
    """Return the launch's number of redundant experts, adjusted to the new expert degree."""
    experts, copies = inputs.decoder.experts, inputs.launch.setting.redundant_experts
    if experts is None or not copies or degrees.expert == 1:
        return 0
    if are_even(experts.num, copies, degrees.expert):
        return copies
    return fewest_redundant(experts.num, degrees.expert)


def _copies(inputs: EstimateInputs, now: InstanceKnobs) -> Iterator[LaunchChange]:
    """Yield other numbers of redundant experts; without recorded loads their gain is unknown."""
    experts, ranks = inputs.decoder.experts, now.degrees.expert
    if experts is None or inputs.copies.loads is None or ranks == 1:
        return
    minimum, maximum = fewest_redundant(experts.num, ranks), int(MOST_RATIO * experts.num)
    for copies in (now.redundant_experts - ranks, now.redundant_experts + ranks):
        if minimum <= copies <= maximum:
            yield _moved(now, "redundant experts", redundant_experts=copies)


def _steps(inputs: EstimateInputs, now: InstanceKnobs) -> Iterator[LaunchChange]:
    """Yield other step budgets and all-to-all backends."""
    if inputs.launch.role is not Role.DECODE:
        if not now.is_chunked and "is_chunked" in _launch_flags(inputs):
            yield _set("step", "chunked prefill", is_chunked=True)
        for tokens in (2 * now.step_tokens, now.step_tokens // 2):
            if BUDGETS[0] <= tokens <= BUDGETS[-1]:
                yield _moved(now, "step", " tokens", step_tokens=tokens)
    if now.degrees.attention_data == 1 or inputs.decoder.experts is None:
        return
    kernels = "deepep_normal" if inputs.launch.role is Role.PREFILL else "deepep_low_latency"
    for backend in ("allgather", kernels):
        if backend != now.a2a_backend:
            yield _moved(now, "all-to-all", a2a_backend=backend, two_batch_overlap=False)
    if now.a2a_backend != "allgather":
        words = f"{'without' if now.two_batch_overlap else 'with'} two-batch overlap"
        yield _set("all-to-all", words, two_batch_overlap=not now.two_batch_overlap)


def _pairs(now: InstanceDegrees) -> Iterator[tuple[int, int]]:
    """Yield tensor and data ranks of attention one step away."""
    tensor, data = now.attention_tensor, now.attention_data
    yield from ((2 * tensor, data), (tensor, 2 * data))
    if tensor % 2 == 0:
        yield from ((tensor // 2, data), (tensor // 2, 2 * data))
    if data % 2 == 0:
        yield from ((tensor, data // 2), (2 * tensor, data // 2))
    yield from ((1, tensor * data), (tensor * data, 1))


def _larger(now: InstanceDegrees, *, max_devices: int) -> Iterator[tuple[int, int]]:
    """Yield larger degrees, for a launch whose neighbours do not fit either."""
    factor = 4
    while factor * now.devices <= max_devices:
        yield factor * now.attention_tensor, now.attention_data
        yield now.attention_tensor, factor * now.attention_data
        factor *= 2


def _attention(now: InstanceDegrees, pairs: Sequence[tuple[int, int]]) -> Iterator[InstanceDegrees]:
    for ranks, groups in pairs:
        devices = ranks * groups
        is_kept = now.expert > 1 and devices % now.moe_tensor == 0
        yield InstanceDegrees(
            attention_tensor=ranks,
            attention_data=groups,
            moe_tensor=now.moe_tensor if is_kept else devices,
            expert=devices // now.moe_tensor if is_kept else 1,
            pipeline=now.pipeline,
            stage_machines=now.stage_machines,
            context=now.context,
        )
        if now.devices == 1 and devices > 1:
            # One device has no expert split to keep.
            yield InstanceDegrees(attention_tensor=ranks, attention_data=groups, expert=devices)


def _experts(now: InstanceDegrees) -> Iterator[InstanceDegrees]:
    ranks = now.devices // now.pipeline
    for expert in (ranks, 1, 2 * now.expert, now.expert // 2):
        if expert and ranks % expert == 0:
            yield replace(now, expert=expert, moe_tensor=ranks // expert)


def _contexts(
    inputs: EstimateInputs, now: InstanceDegrees, *, fits_now: bool
) -> Iterator[InstanceDegrees]:
    """Yield fewer context ranks, and more where the cache is what limits the launch."""
    copies = inputs.decoder.cache_copies(now.attention_tensor)
    if copies == 1 or not ENGINE_TRAITS[inputs.launch.engine].has_context:
        return
    more = (2 * now.context, copies) if not fits_now or _is_cache_bound(inputs) else ()
    for context in (now.context // 2, *more):
        if context and copies % context == 0:
            yield replace(now, context=context)


def _shared(inputs: EstimateInputs, degrees: InstanceDegrees) -> InstanceDegrees:
    """Return degrees with as many of the launch's context ranks as have equal keys."""
    copies = inputs.decoder.cache_copies(degrees.attention_tensor)
    whole = ENGINE_TRAITS[inputs.launch.engine].shares_side_caches
    return degrees.sharing(math.gcd(degrees.context, copies), shares_side=whole)


def _is_legal(inputs: EstimateInputs, setting: InstanceKnobs) -> bool:
    """Return whether heads, experts and devices allow a setting, memory and the release aside."""
    experts, degrees = inputs.decoder.experts, setting.degrees
    if not inputs.decoder.is_split_by(degrees.attention_tensor):
        return False
    if degrees.devices * inputs.instances > inputs.serving_pool.pool.num_devices:
        return False
    if experts is None:
        return degrees.attention_data == 1
    is_even = are_even(experts.num, setting.redundant_experts, degrees.expert)
    return is_even and experts.ffn % degrees.moe_tensor == 0


def _described(before_setting: InstanceKnobs, after_setting: InstanceKnobs) -> str:
    now, new = before_setting.degrees, after_setting.degrees
    parts = [
        f"{name} {before} -> {after}"
        for name, before, after in (
            ("TP", now.attention_tensor, new.attention_tensor),
            ("DP", now.attention_data, new.attention_data),
            ("EP", now.expert, new.expert),
            ("PP", now.pipeline, new.pipeline),
            ("DCP", now.context, new.context),
            (
                "redundant experts",
                before_setting.redundant_experts,
                after_setting.redundant_experts,
            ),
        )
        if before != after
    ]
    if not parts:
        parts.append(f"MoE-TP {now.moe_tensor} -> {new.moe_tensor}")
    return ", ".join(parts)


def _priced(
    now: EstimateInputs,
    change: LaunchChange,
    *,
    load: ServingLoad | None,
    known: frozenset[str],
) -> ServingChange | None:
    """Price a change; None where the launch after it does not fit or cannot be launched."""
    launch = change.apply(now.launch)
    inputs, setting = with_launch(now, launch), launch.setting
    option = price_option(inputs, setting)
    if misfit_reason(inputs, option, setting):
        return None
    if not known.issuperset(manifest_refusals(inputs, option, setting)):
        return None
    new = simulate_load(inputs, option)
    return ServingChange(
        what=change.words,
        lines=_lines(now, launch),
        instance=to_plan_instances(inputs, option, setting),
        load=new,
        gain_ratio=_gain_ratio(load, new),
        **(
            _ratio_bands(new, load)
            if launch == _with_knobs(now.launch, degrees=setting.degrees)
            else {}
        ),
        beats=load is None or _beats(inputs, new, load),
    )


def _ratio_bands(new: ServingLoad, old: ServingLoad | None) -> dict[str, tuple[float, float]]:
    """Return the bands of the ratios to the launch's latencies, by field."""
    bands = {}
    for name, band in zip(("ttft", "tpot"), ratio_bands(), strict=True):
        before = None if old is None else getattr(old, f"{name}_s")
        after = getattr(new, f"{name}_s")
        if before is not None and after is not None:
            bands[f"{name}_ratio_band"] = band.around(after.mean / before.mean)
    return bands


def _gain_ratio(load: ServingLoad | None, new: ServingLoad) -> float:
    if load is None or load.goodput_per_device <= 0.0:
        return 0.0
    return new.goodput_per_device / load.goodput_per_device - 1.0


def _beats(inputs: EstimateInputs, new: ServingLoad, old: ServingLoad) -> bool:
    misses, least_gain = (_misses(new), _misses(old)), tie_ratio()
    if misses[0] != misses[1]:
        return misses[0] < misses[1]
    least = old.goodput_per_device
    if new.goodput_per_device > (1.0 + least_gain) * least:
        return True
    is_as_good = new.goodput_per_device >= (1.0 - least_gain) * least
    shorter = (1.0 - least_gain) * request_s(inputs, old)
    return is_as_good and request_s(inputs, new) < shorter


def _misses(load: ServingLoad) -> int:
    """Count missed SLO targets; falling behind the traffic counts as one more."""
    return len(load.missed) + (not load.keeps_up)


def request_s(inputs: EstimateInputs, load: ServingLoad) -> float:
    """Seconds of a mean request, of the phases that the launch serves."""
    first_s = 0.0 if load.ttft_s is None else load.ttft_s.mean
    each_s = 0.0 if load.tpot_s is None else load.tpot_s.mean
    return first_s + (inputs.demand.output_tokens - 1.0) * each_s


def _rank(inputs: EstimateInputs, load: ServingLoad) -> tuple[float, float, float]:
    return _misses(load), -load.goodput_per_device, request_s(inputs, load)


def _lines(inputs: EstimateInputs, launch: ServingLaunch) -> tuple[str, ...]:
    """Return the flags that differ, as the launch has to set them."""
    experts = inputs.decoder.experts
    state = partial(
        engine_file(launch.engine, "read").knob_flags,
        role=launch.role,
        draft_method=inputs.draft_method,
        num_experts=0 if experts is None else experts.num,
    )
    now, new = (dict(state(variant.setting)) for variant in (inputs.launch, launch))
    changed = [f"{name} {new[name]}".strip() for name in new if now.get(name) != new[name]]
    for field, line in _launch_flags(inputs).items():
        before, after = (_stated(variant, field) for variant in (inputs.launch, launch))
        if after != before:
            words = line.format(before if after is None else after)
            changed.append(words if after is not None else f"without {words.split()[0]}")
    return (*changed, *(f"without {name}" for name in now if name not in new))


def _launch_flags(inputs: EstimateInputs) -> Mapping[str, str]:
    flags: Mapping[str, str] = engine_file(inputs.launch.engine, "read").LAUNCH_FLAGS
    return flags


def _stated(launch: ServingLaunch, field: str) -> object:
    return getattr(launch.setting if field == "is_chunked" else launch, field)
