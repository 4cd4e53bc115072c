"""A serving launch with one thing changed: a degree, the experts' split, or the batch.

    twice or half the tensor or data ranks of attention    other devices; where the launch does not
                                                           fit also 4, 8, ... times
    a factor of two from tensor to data ranks, or back     the same devices
    all devices data ranks, or all tensor ranks            the same devices
    experts whole on ranks, or sliced over them            the same devices
    twice or half the batch, or all that memory holds      the same devices
    twice or half the tokens of a step with prompts        the same devices
    another exchange, or two half batches that overlap     the same devices
    a slot for experts more or fewer on every rank         the same devices, where their loads are
                                                           recorded
    drafts, or none                                        the same devices, where the spec says how
                                                           many are kept

Precision stays, and where experts are whole or sliced they stay so over the new ranks. A change
beats the launch when it misses fewer targets; or misses as many and has more goodput per device by
more than what ratios of two layouts are known to (`tie_ratio`, tuner/planner/serve/to_plan.py); or
as much of that with requests (TTFT + (O - 1) TPOT) shorter by more. The best has the fewest missed
targets, then the most goodput per device, then the shortest requests. Ratios to the launch's
latencies carry bands where the degrees alone differ, which is what published runs compare.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tuner.costs.serving.bands import ratio_bands
from tuner.costs.serving.engine import Degrees, Engine
from tuner.costs.serving.speculative import Method
from tuner.estimate.serving.instance import (
    Asked,
    instance_of,
    load_of,
    misfit_of,
    option_of,
)
from tuner.estimate.serving.launch import Setting
from tuner.estimate.serving.records import ServingChange, ServingLoad
from tuner.planner.serve.choices import BUDGETS
from tuner.planner.serve.demand import MOST_RUNNING
from tuner.planner.serve.expert_copies import MOST_RATIO
from tuner.planner.serve.instances import launched_as
from tuner.planner.serve.options import Option, most_running
from tuner.planner.serve.to_plan import tie_ratio
from tuner.serve_plan import Role
from tuner.spec.serving.expert_slots import are_even, fewest_redundant
from tuner.spec.serving.manifests.afd import cell_refusals
from tuner.spec.serving.manifests.registry import release_on
from tuner.spec.serving.manifests.rules import group_refusals


def changes_of(asked: Asked, load: ServingLoad | None) -> tuple[ServingChange, ...]:
    """Price every change of one thing that fits and can be launched, the best first.

    Args:
        asked: the launch and its traffic.
        load: what the launch does as it is; None where it does not fit.
    """
    if asked.launch.ffn_devices:
        return ()  # Sizes of a cell are chosen together, by planning.
    found = [
        made
        for what, setting in dict(_neighbours(asked, fits_now=load is not None)).items()
        if (made := _change(asked, setting, what=what, load=load)) is not None
    ]
    return tuple(sorted(found, key=lambda change: _rank(asked, change.load)))


def refused(asked: Asked, option: Option, setting: Setting) -> tuple[str, ...]:
    """Return what the release says against an instance."""
    engine = release_on(asked.goal, asked.site.pool)
    generation = asked.site.machine.sheet.generation
    groups = [instance_of(asked, option, setting)]
    lines: list[str] = []
    if asked.launch.ffn_devices:
        groups += launched_as(option, count=asked.instances)[1:]
        if engine.afd is None:
            lines.append("it has no attention and FFN servers apart; vllm 0.30.0+afd does")
        else:
            pools = {asked.site.pool.name: generation}
            lines += cell_refusals(engine.afd, groups, generations=pools)
    for group in groups:
        lines += group_refusals(
            engine,
            group,
            model=asked.spec.model,
            goal=asked.goal,
            devices_per_node=asked.site.pool.devices_per_node,
            generation=generation,
        )
    return tuple(f"{engine.title}: {line}" for line in lines)


def _neighbours(asked: Asked, *, fits_now: bool) -> Iterator[tuple[str, Setting]]:
    """Yield what is changed, in words, and the setting."""
    now = asked.launch.setting
    pairs = [*_pairs(now.degrees)]
    if not fits_now:
        pairs += _larger(now.degrees, most=asked.site.pool.num_devices)
    found = (*_attention(now.degrees, pairs), *_experts(now.degrees))
    if asked.decoder.experts is None:
        found = tuple(replace(degrees, expert=1, moe_tensor=1) for degrees in found)
    for degrees in dict.fromkeys(found):
        changed = replace(now, degrees=degrees, redundant_experts=_even_copies(asked, degrees))
        if degrees != now.degrees and _is_legal(asked, changed):
            yield _described(now, changed), changed
    yield from _steps(asked, now)
    yield from _copies(asked, now)
    if asked.launch.role is Role.PREFILL:
        return
    yield from _drafts(asked, now)
    # Beyond what memory holds, or a closed loop asks for, a batch changes nothing.
    option = option_of(asked, now)
    held = int(most_running(option.kv_tokens, asked.demand, engine=option.iteration.engine))
    concurrency = asked.demand.concurrency
    if concurrency is not None:
        held = min(held, math.ceil(concurrency / (asked.instances * now.degrees.attention_data)))
    used = min(now.running, held)
    for running in dict.fromkeys((min(2 * used, held), held, used // 2)):
        if running not in (0, used):
            yield f"batch {used} -> {running} sequences a rank", replace(now, running=running)


def _even_copies(asked: Asked, degrees: Degrees) -> int:
    """Return the launch's copies of experts; those that other ranks need where it has any."""
    own, copies = asked.decoder.experts, asked.launch.setting.redundant_experts
    if own is None or not copies or degrees.expert == 1:
        return 0
    if are_even(own.num, copies, degrees.expert):
        return copies
    return fewest_redundant(own.num, degrees.expert)


def _copies(asked: Asked, now: Setting) -> Iterator[tuple[str, Setting]]:
    """Yield other numbers of copies of experts; without recorded loads nothing says their gain."""
    own, ranks = asked.decoder.experts, now.degrees.expert
    if own is None or asked.copies.loads is None or ranks == 1:
        return
    least, most = fewest_redundant(own.num, ranks), int(MOST_RATIO * own.num)
    for copies in (now.redundant_experts - ranks, now.redundant_experts + ranks):
        if least <= copies <= most:
            what = f"redundant experts {now.redundant_experts} -> {copies}"
            yield what, replace(now, redundant_experts=copies)


def _steps(asked: Asked, now: Setting) -> Iterator[tuple[str, Setting]]:
    """Yield other budgets and exchanges."""
    if asked.launch.role is not Role.DECODE:
        for tokens in (2 * now.step_tokens, now.step_tokens // 2):
            if BUDGETS[0] <= tokens <= BUDGETS[-1]:
                yield f"step {now.step_tokens} -> {tokens} tokens", replace(now, step_tokens=tokens)
    if now.degrees.attention_data == 1 or asked.decoder.experts is None:
        return
    kernels = "deepep_normal" if asked.launch.role is Role.PREFILL else "deepep_low_latency"
    for backend in ("allgather", kernels):
        if backend != now.a2a_backend:
            plain = replace(now, a2a_backend=backend, two_batch_overlap=False)
            yield f"exchange {now.a2a_backend} -> {backend}", plain
    if now.a2a_backend != "allgather":
        does = "without" if now.two_batch_overlap else "with"
        other = replace(now, two_batch_overlap=not now.two_batch_overlap)
        yield f"{does} two half batches that overlap", other


def _drafts(asked: Asked, now: Setting) -> Iterator[tuple[str, Setting]]:
    """Yield drafting where there is none, and none where there is."""
    own = asked.goal.speculative
    if own is None:
        return
    tokens = 0 if now.draft_tokens else own.draft_tokens
    yield f"drafts {now.draft_tokens} -> {tokens}", replace(now, draft_tokens=tokens)


def _pairs(now: Degrees) -> Iterator[tuple[int, int]]:
    """Yield tensor and data ranks of attention one step away."""
    tensor, data = now.attention_tensor, now.attention_data
    yield from ((2 * tensor, data), (tensor, 2 * data))
    if tensor % 2 == 0:
        yield from ((tensor // 2, data), (tensor // 2, 2 * data))
    if data % 2 == 0:
        yield from ((tensor, data // 2), (2 * tensor, data // 2))
    yield from ((1, tensor * data), (tensor * data, 1))


def _larger(now: Degrees, *, most: int) -> Iterator[tuple[int, int]]:
    """Yield those that are further away, where nothing near holds the model."""
    factor = 4
    while factor * now.devices <= most:
        yield factor * now.attention_tensor, now.attention_data
        yield now.attention_tensor, factor * now.attention_data
        factor *= 2


def _attention(now: Degrees, pairs: Sequence[tuple[int, int]]) -> Iterator[Degrees]:
    for ranks, groups in pairs:
        devices = ranks * groups
        is_kept = now.expert > 1 and devices % now.moe_tensor == 0
        yield Degrees(
            attention_tensor=ranks,
            attention_data=groups,
            moe_tensor=now.moe_tensor if is_kept else devices,
            expert=devices // now.moe_tensor if is_kept else 1,
        )
        if now.devices == 1 and devices > 1:
            # One device has no split of experts to keep.
            yield Degrees(attention_tensor=ranks, attention_data=groups, expert=devices)


def _experts(now: Degrees) -> Iterator[Degrees]:
    ranks = now.devices // now.pipeline
    for expert in (ranks, 1, 2 * now.expert, now.expert // 2):
        if expert and ranks % expert == 0:
            yield replace(now, expert=expert, moe_tensor=ranks // expert)


def _is_legal(asked: Asked, setting: Setting) -> bool:
    """Whether heads, experts and devices allow it; memory and the release are asked later."""
    own, degrees = asked.decoder.experts, setting.degrees
    heads = min(group.attention.heads for group in asked.decoder.layers)
    if heads % degrees.attention_tensor:
        return False
    if degrees.devices * asked.instances > asked.site.pool.num_devices:
        return False
    if own is None:
        return degrees.attention_data == 1
    is_even = are_even(own.num, setting.redundant_experts, degrees.expert)
    return is_even and own.ffn % degrees.moe_tensor == 0


def _described(before_setting: Setting, after_setting: Setting) -> str:
    now, new = before_setting.degrees, after_setting.degrees
    parts = [
        f"{name} {before} -> {after}"
        for name, before, after in (
            ("TP", now.attention_tensor, new.attention_tensor),
            ("DP", now.attention_data, new.attention_data),
            ("EP", now.expert, new.expert),
            (
                "redundant experts",
                before_setting.redundant_experts,
                after_setting.redundant_experts,
            ),
        )
        if before != after
    ]
    if not parts:
        parts.append(f"slices of experts {now.moe_tensor} -> {new.moe_tensor}")
    return ", ".join(parts)


def _change(
    asked: Asked, setting: Setting, *, what: str, load: ServingLoad | None
) -> ServingChange | None:
    option = option_of(asked, setting)
    if misfit_of(asked, option, setting) or refused(asked, option, setting):
        return None
    new = load_of(asked, option)
    return ServingChange(
        what=what,
        lines=_lines(asked, setting),
        instance=instance_of(asked, option, setting),
        load=new,
        gain_ratio=_gain_ratio(load, new),
        **(_ratio_bands(new, load) if setting == _moved(asked, setting) else {}),
        beats=load is None or _beats(asked, new, load),
    )


def _moved(asked: Asked, setting: Setting) -> Setting:
    """Return the launch's setting with the degrees of another."""
    return replace(asked.launch.setting, degrees=setting.degrees)


def _ratio_bands(new: ServingLoad, old: ServingLoad | None) -> dict[str, tuple[float, float]]:
    """Return the bands of the ratios to the launch's latencies, by field."""
    found = {}
    for name, band in zip(("ttft", "tpot"), ratio_bands(), strict=True):
        before = None if old is None else getattr(old, f"{name}_s")
        after = getattr(new, f"{name}_s")
        if before is not None and after is not None:
            found[f"{name}_ratio_band"] = band.around(after.mean / before.mean)
    return found


def _gain_ratio(load: ServingLoad | None, new: ServingLoad) -> float:
    if load is None or load.goodput_per_device <= 0.0:
        return 0.0
    return new.goodput_per_device / load.goodput_per_device - 1.0


def _beats(asked: Asked, new: ServingLoad, old: ServingLoad) -> bool:
    misses, least_gain = (_misses(new), _misses(old)), tie_ratio()
    if misses[0] != misses[1]:
        return misses[0] < misses[1]
    least = old.goodput_per_device
    if new.goodput_per_device > (1.0 + least_gain) * least:
        return True
    is_as_good = new.goodput_per_device >= (1.0 - least_gain) * least
    shorter = (1.0 - least_gain) * request_s(asked, old)
    return is_as_good and request_s(asked, new) < shorter


def _misses(load: ServingLoad) -> int:
    """Count missed targets; to fall behind what comes is one more."""
    return len(load.missed) + (not load.keeps_up)


def request_s(asked: Asked, load: ServingLoad) -> float:
    """Seconds of a mean request, as far as the launch has a part in it."""
    first_s = 0.0 if load.ttft_s is None else load.ttft_s.mean
    each_s = 0.0 if load.tpot_s is None else load.tpot_s.mean
    return first_s + (asked.demand.output_tokens - 1.0) * each_s


def _rank(asked: Asked, load: ServingLoad) -> tuple[float, float, float]:
    return _misses(load), -load.goodput_per_device, request_s(asked, load)


def _lines(asked: Asked, setting: Setting) -> tuple[str, ...]:
    """Return the flags that differ, as the launch has to say them."""
    flags = _FLAGS[asked.launch.engine]
    now, new = (dict(flags(asked, one)) for one in (asked.launch.setting, setting))
    changed = [f"{name} {new[name]}".strip() for name in new if now.get(name) != new[name]]
    return (*changed, *(f"without {name}" for name in now if name not in new))


def _sglang_flags(asked: Asked, setting: Setting) -> Iterator[tuple[str, str]]:
    own = setting.degrees
    yield "--tp-size", str(own.devices // own.pipeline)
    if asked.launch.role is not Role.DECODE:
        yield "--chunked-prefill-size", str(setting.step_tokens * own.attention_data)
    if setting.a2a_backend.startswith("deepep"):
        mode = "normal" if setting.a2a_backend == "deepep_normal" else "auto"
        yield "--moe-a2a-backend", "deepep"
        yield "--deepep-mode", mode
    if setting.two_batch_overlap:
        yield "--enable-two-batch-overlap", ""
    if setting.draft_tokens:
        is_own = asked.draft_method is Method.MTP
        yield "--speculative-algorithm", "NEXTN" if is_own else "EAGLE"
        yield "--speculative-num-steps", str(setting.draft_tokens)
        yield "--speculative-eagle-topk", "1"
        yield "--speculative-num-draft-tokens", str(setting.draft_tokens + 1)
    if own.attention_data > 1:
        yield "--attn-dp-size", str(own.attention_data)
    if own.expert > 1:
        yield "--ep-size", str(own.expert)
    if setting.redundant_experts:
        yield "--ep-num-redundant-experts", str(setting.redundant_experts)
        yield "--enable-eplb", ""
    yield "--max-running-requests", str(min(setting.running, MOST_RUNNING) * own.attention_data)


def _vllm_flags(asked: Asked, setting: Setting) -> Iterator[tuple[str, str]]:
    own = setting.degrees
    yield "--max-num-batched-tokens", str(setting.step_tokens)
    if setting.a2a_backend.startswith("deepep"):
        is_normal = setting.a2a_backend == "deepep_normal"
        yield "--all2all-backend", f"deepep_{'high_throughput' if is_normal else 'low_latency'}"
    if setting.two_batch_overlap:
        yield "--enable-dbo", ""
    if setting.draft_tokens:
        method = asked.draft_method.value
        config = {"method": method, "num_speculative_tokens": setting.draft_tokens}
        yield "--speculative-config", f"'{json.dumps(config)}'"
    yield "--tensor-parallel-size", str(own.attention_tensor)
    if own.attention_data > 1:
        yield "--data-parallel-size", str(own.attention_data)
    if own.expert > 1:
        yield "--enable-expert-parallel", ""
    if setting.redundant_experts:
        yield "--enable-eplb", ""
        config = {"num_redundant_experts": setting.redundant_experts}
        yield "--eplb-config", f"'{json.dumps(config)}'"
    yield "--max-num-seqs", str(min(setting.running, MOST_RUNNING))


def _trtllm_options(asked: Asked, setting: Setting) -> Iterator[tuple[str, str]]:
    own = setting.degrees
    yield "tensor_parallel_size:", str(own.devices // own.pipeline)
    yield "enable_attention_dp:", str(own.attention_data > 1).lower()
    if asked.decoder.experts is not None:
        yield "moe_tensor_parallel_size:", str(own.moe_tensor)
        yield "moe_expert_parallel_size:", str(own.expert)
        if setting.redundant_experts:
            slots = asked.decoder.experts.num + setting.redundant_experts
            yield "moe_config.load_balancer.num_slots:", str(slots)
    yield "max_num_tokens:", str(setting.step_tokens)
    if setting.a2a_backend in _TRTLLM_METHOD:
        yield "TRTLLM_FORCE_COMM_METHOD", _TRTLLM_METHOD[setting.a2a_backend]
    if setting.draft_tokens:
        yield "speculative_config.max_draft_len:", str(setting.draft_tokens)
    yield "max_batch_size:", str(min(setting.running, MOST_RUNNING))


_TRTLLM_METHOD: Final = {
    "allgather": "ALLGATHER",
    "deepep_normal": "DEEPEP",
    "deepep_low_latency": "DEEPEPLOWLATENCY",
}
_FLAGS: Final[Mapping[Engine, Callable[[Asked, Setting], Iterator[tuple[str, str]]]]] = {
    Engine.SGLANG: _sglang_flags,
    Engine.VLLM: _vllm_flags,
    Engine.TRTLLM: _trtllm_options,
}
"""What a launch says, by engine."""
