"""Rules on one step of an instance: tokens, drafts, two-batch overlap, pages and multiplexing.

A verification step has draft_tokens + 1 tokens of each running request (Leviathan et al.,
arXiv:2211.17192), which buffers and graphs must fit.
"""

from collections.abc import Iterator
from typing import Final

from tuner.catalog.serve_rules.kv_cache import CacheKind
from tuner.catalog.serve_rules.manifest import DEEPEP, UNITS, ServingCapabilities
from tuner.config.serve import Instances
from tuner.devices.datasheet import Datasheet
from tuner.spec.model import ModelSpec
from tuner.spec.serving.goal import ServeGoal

RECEIVERS: Final = frozenset({"decode", "attention"})
"""Roles whose instances receive KV caches from prefill."""


def step_refusals(
    engine: ServingCapabilities,
    group: Instances,
    *,
    model: ModelSpec,
    goal: ServeGoal,
    sheet: Datasheet | None,
) -> Iterator[str]:
    """Yield why the release cannot run such steps."""
    yield from _weights(engine, group, goal, sheet=sheet)
    yield from _tokens(engine, group, longest=goal.max_model_len or model.max_position)
    if group.draft_tokens:
        yield from _drafting(engine, group, model=model, goal=goal)
    if group.two_batch_overlap:
        yield from _overlap(engine, group, model=model)
    if group.page_size is not None:
        yield from _pages(engine, group, model=model, goal=goal, sheet=sheet)
    if group.prefill_share_ratio is not None:
        yield from _sharing(engine, group, model=model)


def step_tokens(group: Instances) -> int:
    """Return the tokens of a step in which every running request of a rank is decoded."""
    return group.max_batch * (group.draft_tokens + 1)


def dispatch_tokens(engine: ServingCapabilities, group: Instances) -> int:
    """Return the most tokens of a step that one rank dispatches through low-latency DeepEP."""
    decoded = step_tokens(group)
    if group.role == "decode":
        return decoded
    if group.role == "prefill" or engine.low_latency_takes_prefill:
        return max(decoded, group.max_batched_tokens)
    return decoded


def cache_kind(model: ModelSpec) -> CacheKind:
    """Return the kind of the model's KV cache."""
    return CacheKind.GROUPED if model.attention.kind == "gqa" else CacheKind.LATENT


def lacks_units(goal: ServeGoal, sheet: Datasheet) -> bool:
    """Say whether a device has no units that multiply the goal's weights."""
    units = UNITS.get(goal.quantization)
    return units is not None and units not in sheet.flop_per_s


def _weights(
    engine: ServingCapabilities,
    group: Instances,
    goal: ServeGoal,
    *,
    sheet: Datasheet | None,
) -> Iterator[str]:
    if goal.quantization not in engine.quantization:
        yield f"quantization {goal.quantization} is not one of {', '.join(engine.quantization)}"
        return
    if goal.kv_cache_dtype not in engine.kv_cache_dtype:
        known = ", ".join(engine.kv_cache_dtype)
        yield f"kv_cache_dtype {goal.kv_cache_dtype} is not one of {known}"
    if goal.quantization in engine.no_deepep_quantization and group.a2a_backend in DEEPEP:
        yield f"a2a_backend {group.a2a_backend} does not feed experts in {goal.quantization}"
    if sheet is not None and not engine.weight_only_fallback and lacks_units(goal, sheet):
        units = UNITS[goal.quantization]
        yield f"quantization {goal.quantization} needs {units} units, which {sheet.name} lacks"


def _tokens(engine: ServingCapabilities, group: Instances, *, longest: int) -> Iterator[str]:
    if group.role in RECEIVERS:
        return
    tokens = group.max_batched_tokens
    if engine.batch_needs_tokens and tokens < step_tokens(group):
        factor = f" x {group.draft_tokens + 1} tokens" if group.draft_tokens else ""
        yield f"max_batched_tokens {tokens} is below max_batch {group.max_batch}{factor}"
    if engine.whole_prompt_in_one_batch and not group.chunked_prefill and tokens < longest:
        yield (
            f"without chunked prefill max_batched_tokens {tokens} must reach the longest request,"
            f" {longest} tokens; chunk, or lower max_model_len"
        )


def _drafting(
    engine: ServingCapabilities, group: Instances, *, model: ModelSpec, goal: ServeGoal
) -> Iterator[str]:
    drafts = f"draft_tokens {group.draft_tokens}"
    if goal.speculative is None:
        yield f"{drafts} need goal.speculative with the method"
        return
    method = goal.speculative.method
    if method not in engine.drafting:
        known = ", ".join(engine.drafting) or "none"
        yield f"{drafts}: drafting by {method} is not one of {known}"
    if method == "mtp" and not model.mtp_num_layers:
        yield f"{drafts}: {model.architecture} has no MTP layers; draft by eagle"
    if group.pp > 1 and group.role not in engine.drafting_pipeline_roles:
        yield f"{drafts} across pp {group.pp}: drafting needs one pipeline stage"


def _overlap(engine: ServingCapabilities, group: Instances, *, model: ModelSpec) -> Iterator[str]:
    if engine.afd is not None and group.role in ("attention", "expert"):
        return  # One half's attention overlaps with the other half on the FFN server.
    if not engine.overlap_backends:
        yield "two_batch_overlap does not exist; plan without"
        return
    if group.a2a_backend not in engine.overlap_backends:
        yield (
            f"two_batch_overlap overlaps {' or '.join(sorted(engine.overlap_backends))}, not"
            f" a2a_backend {group.a2a_backend}"
        )
    if engine.overlap_needs_attention_dp and group.attention_dp == 1:
        yield "two_batch_overlap needs attention_dp above 1"
    if group.dcp > 1 and not engine.overlap_takes_context:
        yield f"two_batch_overlap does not go with dcp {group.dcp}; leave one of them out"
    known = engine.a2a_architectures
    if known is not None and model.architecture not in known:
        yield f"two_batch_overlap is not built into {model.architecture}"


def _pages(
    engine: ServingCapabilities,
    group: Instances,
    *,
    model: ModelSpec,
    goal: ServeGoal,
    sheet: Datasheet | None,
) -> Iterator[str]:
    page = group.page_size
    assert page is not None
    if engine.page_is_power_of_two and page & (page - 1):
        yield f"page_size {page} must be a power of two"
    legal = engine.pages.legal(
        cache=cache_kind(model),
        generation=None if sheet is None else sheet.generation,
        dtype=goal.kv_cache_dtype,
    )
    if legal is not None and not legal.holds(page):
        yield f"page_size {page}: {legal}"
    chunk = group.max_batched_tokens * group.attention_dp
    in_chunks = group.chunked_prefill and group.role != "decode"
    if engine.chunk_needs_whole_pages and in_chunks and chunk % page:
        yield f"page_size {page} does not divide chunks of {chunk} tokens of all ranks"


def _sharing(engine: ServingCapabilities, group: Instances, *, model: ModelSpec) -> Iterator[str]:
    share = f"prefill_share_ratio {group.prefill_share_ratio:g}"
    if not engine.multiplexed_architectures:
        return  # The mode is refused already.
    if model.architecture not in engine.multiplexed_architectures:
        yield f"{share}: {model.architecture} has no layer-by-layer prefill beside decode"
    wrong = [
        *((f"pp {group.pp}",) if group.pp > 1 else ()),
        *((f"attention_dp {group.attention_dp}",) if group.attention_dp > 1 else ()),
        *((f"a2a_backend {group.a2a_backend}",) if group.a2a_backend in DEEPEP else ()),
        *((f"draft_tokens {group.draft_tokens}",) if group.draft_tokens else ()),
        *(("two_batch_overlap",) if group.two_batch_overlap else ()),
        *(("chunked_prefill",) if group.chunked_prefill else ()),
    ]
    if wrong:
        yield f"{share} does not go with {', '.join(wrong)}"
