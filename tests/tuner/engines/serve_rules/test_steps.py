"""What a step may hold: drafts, halves, pages and shares of a device."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tests.tuner.engines.serving.testing import (
    aggregated,
    disaggregated,
    sample_instances,
    sample_serving,
    shared_device,
)
from tuner.config.serve import Role, ServeDecision
from tuner.devices.datasheet import Generation
from tuner.engines.serve_capabilities import ENGINES
from tuner.engines.serve_rules.manifest import LARGEST_DISPATCH_TOKENS
from tuner.engines.serve_rules.rules import refusals
from tuner.engines.serve_rules.steps import dispatch_tokens
from tuner.engines.serve_writers import emit_serving
from tuner.spec.huggingface.read import read_model
from tuner.spec.model import ModelSpec

EXAMPLES = Path(__file__).parents[4] / "examples/models"
ALL = tuple(ENGINES)
MTP = {"speculative": {"method": "mtp", "draft_tokens": 3, "acceptance": 0.8}}
EAGLE = {"speculative": {"method": "eagle", "draft_tokens": 3, "acceptance": 0.8}}
LOW_LATENCY: dict[str, Any] = {"a2a_backend": "deepep_low_latency"}


@pytest.fixture(scope="module")
def deepseek() -> ModelSpec:
    return read_model(EXAMPLES / "deepseek-v3/config.json")


@pytest.fixture(scope="module")
def qwen() -> ModelSpec:
    return read_model(EXAMPLES / "qwen3-235b-a22b/config.json")


@pytest.fixture(scope="module")
def mixtral() -> ModelSpec:
    return read_model(EXAMPLES / "mixtral-8x7b/config.json")


def _refused(
    engine: str,
    decision: ServeDecision,
    model: ModelSpec,
    goal: Any = None,
    *,
    generation: Generation = Generation.HOPPER,
) -> str:
    plan = sample_serving(model, decision, engine=engine, goal=goal).plan
    pools = {group.pool for group in decision.instances}
    lines = refusals(
        ENGINES[engine][0],
        decision,
        model=model,
        goal=plan.goal,
        devices_per_node=dict.fromkeys(pools, 8),
        generations=dict.fromkeys(pools, generation),
    )
    return "\n".join(lines)


@each_row("engine", ALL)
def test_drafts_count_under_the_low_latency_cap(engine: str, deepseek: ModelSpec) -> None:
    # 256 requests x (3 + 1) tokens are the 1024 that the kernels' tag allows.
    fits = disaggregated(decode={**LOW_LATENCY, "max_batch": 256, "draft_tokens": 3})
    assert not _refused(engine, fits, deepseek, MTP)
    more = disaggregated(decode={**LOW_LATENCY, "max_batch": 257, "draft_tokens": 3})
    line = "1024 tokens per rank and step at most, not 1028; lower the batch or the drafts"
    assert line in _refused(engine, more, deepseek, MTP)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 2000), st.integers(0, 16))
def test_a_decode_step_sends_every_draft_and_one_token_more(batch: int, drafts: int) -> None:
    group = sample_instances(Role.DECODE, max_batch=batch, draft_tokens=drafts, **LOW_LATENCY)
    for engine in ALL:
        assert dispatch_tokens(ENGINES[engine][0], group) == batch * (drafts + 1)
    assert LARGEST_DISPATCH_TOKENS == 1024


@each_row("engine", ALL)
def test_drafting_needs_somebody_who_drafts(
    engine: str, deepseek: ModelSpec, qwen: ModelSpec
) -> None:
    decision = aggregated(draft_tokens=3)
    assert not _refused(engine, decision, deepseek, MTP)
    assert "need goal.speculative with the method" in _refused(engine, decision, deepseek)
    assert "Qwen3MoeForCausalLM has no MTP layers" in _refused(engine, decision, qwen, MTP)
    # Its config leaves out the layer of its checkpoint.
    hybrid = read_model(EXAMPLES / "qwen3-next-80b-a3b")
    assert "no MTP layers" not in _refused(engine, decision, hybrid, MTP)
    eagle = _refused(engine, decision, qwen, EAGLE)
    assert ("drafting by eagle is not one of mtp" in eagle) == (engine == "trtllm")


def test_drafting_across_pipeline_stages_is_what_each_release_says(deepseek: ModelSpec) -> None:
    wide = {"devices": 16, "attention_dp": 1, "attention_tp": 8, "pp": 2, "draft_tokens": 3}
    refused = {engine for engine in ALL if _refused(engine, aggregated(**wide), deepseek, MTP)}
    assert refused == {"sglang", "trtllm"}


@each_row("engine", ALL)
def test_decode_groups_draft_equally_many_tokens(engine: str, deepseek: ModelSpec) -> None:
    one = disaggregated(decode={"draft_tokens": 3})
    plain = sample_instances(Role.DECODE, count=1)
    both = one.model_copy(update={"instances": (*one.instances, plain)})
    assert "decode groups draft 0 and 3 tokens" in _refused(engine, both, deepseek, MTP)


def test_a_batch_with_its_drafts_must_fit_the_tokens_of_a_step(deepseek: ModelSpec) -> None:
    decision = aggregated(max_batched_tokens=128, draft_tokens=3)
    line = "max_batched_tokens 128 is below max_batch 64 x 4 tokens"
    assert line in _refused("vllm", decision, deepseek, MTP)


@each_row(
    ("engine", "changes", "line"),
    [
        ("sglang", {"a2a_backend": "deepep_normal"}, ""),
        ("vllm", {"a2a_backend": "deepep_normal"}, ""),
        ("sglang", {}, "not a2a_backend none"),
        ("vllm", {"a2a_backend": "allgather"}, "not a2a_backend allgather"),
        ("trtllm", {"a2a_backend": "deepep_normal"}, "two_batch_overlap does not exist"),
    ],
)
def test_two_batch_overlap_needs_an_all_to_all(
    engine: str, changes: dict[str, Any], line: str, deepseek: ModelSpec
) -> None:
    lines = _refused(engine, aggregated(two_batch_overlap=True, **changes), deepseek)
    assert line in lines
    assert bool(lines) == bool(line)


def test_sglang_builds_deepep_into_some_models(mixtral: ModelSpec, qwen: ModelSpec) -> None:
    decision = aggregated(a2a_backend="deepep_normal")
    assert "is not built into the experts of MixtralForCausalLM" in _refused(
        "sglang", decision, mixtral
    )
    assert not _refused("sglang", decision, qwen)
    assert not _refused("vllm", decision, mixtral)


@each_row(
    ("engine", "generation", "page", "line"),
    [
        ("sglang", Generation.HOPPER, 1, ""),
        ("sglang", Generation.HOPPER, 64, ""),
        ("sglang", Generation.BLACKWELL, 1, "pages of 32, 64 tokens"),
        ("sglang", Generation.HOPPER, 96, "does not divide chunks of 65536 tokens"),
        ("vllm", Generation.HOPPER, 16, ""),
        ("vllm", Generation.HOPPER, 24, "whole multiples of 16"),
        ("vllm", Generation.BLACKWELL, 16, "whole multiples of 32"),
        ("vllm", Generation.BLACKWELL, 64, ""),
        ("trtllm", Generation.HOPPER, 48, "must be a power of two"),
        ("trtllm", Generation.HOPPER, 32, "pages of 64 tokens"),
        ("trtllm", Generation.HOPPER, 64, ""),
        ("trtllm", Generation.BLACKWELL, 32, ""),
    ],
)
def test_pages_are_those_that_the_kernels_take(
    engine: str, generation: Generation, page: int, line: str, deepseek: ModelSpec
) -> None:
    lines = _refused(engine, aggregated(page_size=page), deepseek, generation=generation)
    assert line in lines
    assert bool(lines) == bool(line), lines


def test_fp8_latent_caches_need_the_pages_of_flashmla(deepseek: ModelSpec) -> None:
    fp8 = {"kv_cache_dtype": "fp8"}
    assert "multiples of 64" in _refused("vllm", aggregated(page_size=16), deepseek, fp8)
    assert not _refused("vllm", aggregated(page_size=128), deepseek, fp8)


@each_row(
    ("quantization", "generation", "has_units"),
    [
        ("nvfp4", Generation.HOPPER, False),
        ("nvfp4", Generation.BLACKWELL, True),
        ("mxfp4", Generation.HOPPER, True),
        ("fp8_block", Generation.AMPERE, False),
        ("fp8", Generation.ADA, True),
        ("bf16", Generation.AMPERE, True),
    ],
)
def test_weights_without_units_are_refused_or_unpacked(
    quantization: str, generation: Generation, has_units: bool, deepseek: ModelSpec
) -> None:
    goal = {"quantization": quantization}
    for engine in ALL:
        lines = _refused(engine, aggregated(), deepseek, goal, generation=generation)
        assert bool(lines) == (engine == "trtllm" and not has_units)
        assert not lines or f"not {generation}" in lines


def test_scripts_say_where_weights_are_unpacked(deepseek: ModelSpec) -> None:
    for device, said in (("h100", True), ("b200", False)):
        verified = sample_serving(
            deepseek, aggregated(), goal={"quantization": "nvfp4"}, devices={"h100": device}
        )
        files = {str(file.path): file.text for file in emit_serving("sglang", verified)}
        assert ("has no tensor cores for nvfp4" in files["aggregated.sh"]) == said


def test_shared_devices_are_sglangs_for_some_models(
    qwen: ModelSpec, deepseek: ModelSpec, mixtral: ModelSpec
) -> None:
    assert not _refused("sglang", shared_device(), qwen)
    for model in (deepseek, mixtral):
        lines = _refused("sglang", shared_device(), model)
        assert f"{model.architecture} has no layer-by-layer prefill beside decode" in lines
    for engine in ("vllm", "trtllm"):
        lines = _refused(engine, shared_device(), qwen)
        assert "mode shared_device is not one of aggregated, disaggregated: the release" in lines


@each_row(
    ("changes", "line"),
    [
        ({"attention_dp": 8, "attention_tp": 1}, "does not go with attention_dp 8"),
        ({"devices": 16, "pp": 2}, "does not go with pp 2"),
        ({"chunked_prefill": True}, "does not go with chunked_prefill"),
        ({"a2a_backend": "deepep_normal"}, "does not go with a2a_backend deepep_normal"),
    ],
)
def test_what_a_shared_device_excludes_is_named(
    changes: dict[str, Any], line: str, qwen: ModelSpec
) -> None:
    assert line in _refused("sglang", shared_device(**changes), qwen)


@each_row("engine", ALL)
@each_row("mode", ["attention_expert", "prefill_offload"])
def test_modes_without_a_launcher_say_why(engine: str, mode: str, deepseek: ModelSpec) -> None:
    decision = aggregated().model_copy(update={"mode": mode})
    lines = _refused(engine, decision, deepseek)
    assert f"mode {mode} is not one of" in lines
    assert {
        "attention_expert": "has no attention-FFN disaggregation",
        "prefill_offload": "cached in part",
    }[mode] in lines
    assert len(lines.splitlines()) == 1
