"""What each release refuses, with the value, the rule and the way out in the line."""

from typing import Any, get_args

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
from tests.tuner.models import example_model
from tuner.catalog.serve_rules.manifest import DEEPEP_HIDDEN_SIZES, LARGEST_DISPATCH_TOKENS
from tuner.catalog.serve_rules.models import (
    CHUNKED,
    COMPRESSED,
    EVERY,
    HYBRID,
    SPARSE,
    ZERO_EXPERTS,
    model_refusals,
)
from tuner.catalog.serve_rules.rules import nodes_needed, refusals
from tuner.catalog.serve_rules.steps import dispatch_tokens
from tuner.config.serve import Role, ServeDecision
from tuner.devices.catalogue import DEVICES
from tuner.devices.datasheet import Generation, Vendor
from tuner.engines.serve_writers import emit_serving, unlaunchable
from tuner.engines.serving.releases import (
    ENGINE_TRAITS,
    ENGINES,
    EVERY_RELEASE,
    engine_manifest,
)
from tuner.errors import UnknownTargetError
from tuner.plans.serve import VerifiedServing
from tuner.spec.model import ModelSpec
from tuner.spec.serving.goal import Engine, ServeGoal

ALL = tuple(ENGINES)
OTHERS = ("vllm", "trtllm")
ON_16: dict[str, Any] = {"devices": 16, "attention_dp": 16, "ep": 16}
ON_12: dict[str, Any] = {"devices": 12, "attention_dp": 12, "ep": 12}
ON_72: dict[str, Any] = {"devices": 72, "attention_dp": 72, "ep": 72, "redundant_experts": 32}
TENSOR: dict[str, Any] = {"attention_dp": 1, "attention_tp": 8}
LOW_LATENCY: dict[str, Any] = {"a2a_backend": "deepep_low_latency"}
LOW_72 = {**ON_72, **LOW_LATENCY, "max_batched_tokens": 1024}
NORMAL: dict[str, Any] = {"a2a_backend": "deepep_normal"}
MTP = {"speculative": {"method": "mtp", "draft_tokens": 3, "acceptance": 0.8}}
EAGLE = {"speculative": {"method": "eagle", "draft_tokens": 3, "acceptance": 0.8}}
DEEPSEEK, QWEN, MIXTRAL, DENSE, NEXT, OLMOE, KIMI = map(
    example_model,
    (
        "deepseek-v3",
        "qwen3-235b-a22b",
        "mixtral-8x7b",
        "llama-3.1-8b",
        "qwen3-next-80b-a3b",
        "olmoe-1b-7b",
        "kimi-k2.5",
    ),
)
ANY, APART = aggregated(), disaggregated()
DRAFTS, SHARED = aggregated(draft_tokens=3), shared_device()
SHEET_OF = {sheet.generation: sheet for sheet in DEVICES.values()}


def _refused(
    engine: str,
    decision: ServeDecision,
    model: ModelSpec = DEEPSEEK,
    *,
    goal: Any = None,
    on: Generation | None = None,
) -> str:
    plan = sample_serving(model, decision, engine=engine, goal=goal).plan
    pools = {group.pool for group in decision.instances}
    lines = refusals(
        ENGINES[engine][0],
        decision,
        model=model,
        goal=plan.goal,
        devices_per_node=dict.fromkeys(pools, 8),
        sheets={} if on is None else dict.fromkeys(pools, SHEET_OF[on]),
    )
    return "\n".join(lines)


def _connected(*connectors: str) -> ServeDecision:
    (transfer,) = APART.handovers
    handovers = [transfer.model_copy(update={"connector": one}) for one in connectors]
    return APART.model_copy(update={"handovers": tuple(handovers)})


def _page(tokens: int, on: Generation) -> tuple[ServeDecision, dict[str, Any]]:
    return aggregated(page_size=tokens), {"on": on}


HOPPER, BLACKWELL = Generation.HOPPER, Generation.BLACKWELL
REFUSED: list[tuple[str, tuple[str, ...], ServeDecision, dict[str, Any]]] = [
    ("experts are on all 8 devices", ALL, aggregated(ep=1, moe_tp=1), {}),
    (
        "every device is a data-parallel rank",
        ("trtllm",),
        aggregated(attention_tp=2, attention_dp=4),
        {},
    ),
    ("experts are split or not", ("vllm",), aggregated(moe_tp=2, ep=4), {}),
    (
        "deepep_normal needs moe_tp 1 and ep above 1",
        ALL,
        aggregated(moe_tp=8, ep=1, **NORMAL),
        {},
    ),
    ("deepep_normal needs attention_dp above 1", OTHERS, aggregated(**TENSOR, **NORMAL), {}),
    (
        "1024 tokens per rank and step at most, not 2048",
        ALL,
        disaggregated(decode={"max_batch": 2048, **LOW_LATENCY}),
        {},
    ),
    (
        # vLLM's prompts go through the same buffers; the others' do not.
        "1024 tokens per rank and step at most, not 8192",
        ("vllm",),
        aggregated(**LOW_LATENCY),
        {},
    ),
    (
        "without chunked prefill max_batched_tokens 2048 must reach the longest request, 8192",
        OTHERS,
        aggregated(chunked_prefill=False, max_batched_tokens=2048),
        {},
    ),
    (
        "max_batched_tokens 32 is below max_batch 64",
        ("vllm",),
        aggregated(max_batched_tokens=32),
        {},
    ),
    (
        "a data-parallel rank of attention_tp 16 x pp 1 must fit the 8 devices of a machine",
        ("vllm",),
        aggregated(devices=32, attention_tp=16, attention_dp=2, ep=32),
        {},
    ),
    ("cannot pass through host memory", ("sglang", "trtllm"), disaggregated(path="host"), {}),
    (
        "connector mooncake cannot pass through host memory; nixl can",
        ("vllm",),
        disaggregated(path="host", connector="mooncake"),
        {},
    ),
    ("connector none is not one of nixl, mooncake", ALL, disaggregated(connector="none"), {}),
    ("the KV transfers name none", ALL, _connected(), {}),
    ("['mooncake', 'nixl']", ALL, _connected("nixl", "mooncake"), {}),
    (
        "has roles decode and prefill, the decision of aggregated",
        ALL,
        APART.model_copy(update={"instances": ANY.instances}),
        {},
    ),
    # Experts and their copies.
    ("ep 12 does not divide 256 experts; ep 8 or 16 does", ALL, aggregated(**ON_12), {}),
    ("or redundant_experts 8", ALL, aggregated(**ON_12), {}),
    ("256 experts with 9 redundant", ALL, aggregated(**ON_12, redundant_experts=9), {}),
    (
        "redundant_experts 8 need ep above 1",
        ALL,
        aggregated(**TENSOR, moe_tp=8, ep=1, redundant_experts=8),
        {},
    ),
    ("need attention_dp above 1", ("trtllm",), aggregated(**TENSOR, redundant_experts=8), {}),
    (
        "has no redundant experts",
        ("trtllm",),
        aggregated(redundant_experts=8),
        {"model": NEXT},
    ),
    (
        "has no redundant experts",
        ("sglang", "vllm"),
        aggregated(redundant_experts=8),
        {"model": OLMOE},
    ),
    ("of a model without experts must be 1", ALL, ANY, {"model": DENSE}),
    # Prompts of an aggregated instance are no business of low latency in SGLang.
    ("DeepEP's normal kernels run on", ALL, aggregated(**ON_72, **NORMAL), {}),
    ("DeepEP's normal kernels run on", ("sglang",), aggregated(**LOW_72), {}),
    ("DeepEP's normal kernels run on", (), disaggregated(decode=LOW_72), {}),
    (
        "not 2880",
        ALL,
        disaggregated(decode=LOW_LATENCY),
        {"model": DEEPSEEK.model_copy(update={"hidden_size": 2880})},
    ),
    ("hidden sizes", (), disaggregated(decode=LOW_LATENCY), {}),
    (
        "a2a_backend deepep_normal does not feed experts in int4",
        ("sglang",),
        aggregated(**NORMAL),
        {"model": KIMI, "goal": {"quantization": "int4"}},
    ),
    (
        "quantization int4 is not one of bf16, fp8",
        ("trtllm",),
        ANY,
        {"model": KIMI, "goal": {"quantization": "int4"}},
    ),
    (
        "is not built into the experts of MixtralForCausalLM",
        ("sglang",),
        aggregated(**NORMAL),
        {"model": MIXTRAL},
    ),
    # 256 requests x (3 + 1) tokens are the 1024 that the kernels' tag allows.
    (
        "1024 tokens per rank and step at most, not 1028; lower the batch or the drafts",
        ALL,
        disaggregated(decode={**LOW_LATENCY, "max_batch": 257, "draft_tokens": 3}),
        {"goal": MTP},
    ),
    ("need goal.speculative with the method", ALL, DRAFTS, {}),
    ("Qwen3MoeForCausalLM has no MTP layers", ALL, DRAFTS, {"model": QWEN, "goal": MTP}),
    # Its config leaves out the layer of its checkpoint.
    ("no MTP layers", (), DRAFTS, {"model": NEXT, "goal": MTP}),
    ("drafting by eagle is not one of mtp", ("trtllm",), DRAFTS, {"model": QWEN, "goal": EAGLE}),
    (
        "",
        ("sglang", "trtllm"),
        aggregated(devices=16, **TENSOR, pp=2, draft_tokens=3),
        {"goal": MTP},
    ),
    (
        "max_batched_tokens 128 is below max_batch 64 x 4 tokens",
        ("vllm",),
        aggregated(max_batched_tokens=128, draft_tokens=3),
        {"goal": MTP},
    ),
    (
        "decode groups draft 0 and 3 tokens",
        ALL,
        APART.model_copy(
            update={
                "instances": (
                    *disaggregated(decode={"draft_tokens": 3}).instances,
                    sample_instances(Role.DECODE, count=1),
                )
            }
        ),
        {"goal": MTP},
    ),
    # Halves of a batch that overlap.
    ("", ("trtllm",), aggregated(two_batch_overlap=True, **NORMAL), {}),
    ("not a2a_backend none", ("sglang", "vllm"), aggregated(two_batch_overlap=True), {}),
    (
        "not a2a_backend allgather",
        ("sglang", "vllm"),
        aggregated(two_batch_overlap=True, a2a_backend="allgather"),
        {},
    ),
    (
        "two_batch_overlap does not exist",
        ("trtllm",),
        aggregated(two_batch_overlap=True, **NORMAL),
        {},
    ),
    # Pages are those that the kernels take.
    ("pages of 32, 64 tokens", ("sglang", "trtllm"), *_page(1, BLACKWELL)),
    ("does not divide chunks of 65536 tokens", ("sglang",), *_page(96, HOPPER)),
    ("whole multiples of 16", ("vllm",), *_page(24, HOPPER)),
    ("whole multiples of 32", ("vllm",), *_page(16, BLACKWELL)),
    ("must be a power of two", ("trtllm",), *_page(48, HOPPER)),
    ("pages of 64 tokens", ("trtllm",), *_page(32, HOPPER)),
    (
        "multiples of 64",
        ("vllm",),
        aggregated(page_size=16),
        {"on": HOPPER, "goal": {"kv_cache_dtype": "fp8"}},
    ),
    # Weights without units are refused, or unpacked.
    *(
        (
            f"quantization {quantization} needs {units} units, which {SHEET_OF[on].name} lacks",
            ("trtllm",),
            ANY,
            {"on": on, "goal": {"quantization": quantization}},
        )
        for quantization, units, on in (
            ("nvfp4", "fp4", HOPPER),
            ("fp8_block", "fp8", Generation.AMPERE),
        )
    ),
    *(
        (
            f"{model.architecture} has no layer-by-layer prefill beside decode",
            ("sglang",),
            SHARED,
            {"model": model},
        )
        for model in (DEEPSEEK, MIXTRAL)
    ),
    *(
        (f"does not go with {said}", ("sglang",), shared_device(**changes), {"model": QWEN})
        for said, changes in (
            ("attention_dp 8", {"attention_dp": 8, "attention_tp": 1}),
            ("pp 2", {"devices": 16, "pp": 2}),
            ("chunked_prefill", {"chunked_prefill": True}),
            ("a2a_backend deepep_normal", NORMAL),
        )
    ),
    (
        "mode shared_device is not one of aggregated, disaggregated: the release",
        OTHERS,
        SHARED,
        {"model": QWEN},
    ),
    *(
        (said, ALL, ANY.model_copy(update={"mode": mode}), {})
        for mode, reason in (
            ("attention_expert", "has no attention-FFN disaggregation"),
            ("prefill_offload", "cached in part"),
        )
        for said in (f"mode {mode} is not one of", reason)
    ),
]


@each_row("engine", ALL)
@each_row(("line", "by", "decision", "options"), REFUSED)
def test_what_a_release_cannot_launch_is_refused(
    line: str, by: tuple[str, ...], decision: ServeDecision, options: Any, engine: str
) -> None:
    lines = _refused(engine, decision, **options)
    assert ((line in lines) if line else bool(lines)) == (engine in by)


ALLOWED: list[tuple[tuple[str, ...], ServeDecision, dict[str, Any]]] = [
    (ALL, ANY, {}),
    (ALL, APART, {}),
    (ALL, aggregated(**ON_12, redundant_experts=8), {}),
    (ALL, aggregated(**TENSOR, ep=1), {"model": DENSE}),
    (("vllm",), aggregated(**NORMAL), {"model": KIMI, "goal": {"quantization": "int4"}}),
    (("vllm", "sglang"), ANY, {"model": KIMI, "goal": {"quantization": "int4"}}),
    (("vllm",), aggregated(**NORMAL), {"model": MIXTRAL}),
    (("sglang",), aggregated(**NORMAL), {"model": QWEN}),
    (
        ALL,
        disaggregated(decode={**LOW_LATENCY, "max_batch": 256, "draft_tokens": 3}),
        {"goal": MTP, "on": HOPPER},
    ),
    (ALL, DRAFTS, {"goal": MTP, "on": HOPPER}),
    (("sglang",), SHARED, {"model": QWEN, "on": HOPPER}),
    *((("sglang",), *_page(tokens, HOPPER)) for tokens in (1, 64)),
    (("vllm",), *_page(16, HOPPER)),
    (("vllm",), *_page(64, BLACKWELL)),
    (("trtllm",), *_page(64, HOPPER)),
    (("trtllm",), *_page(32, BLACKWELL)),
    (
        ("vllm",),
        aggregated(page_size=128),
        {"on": HOPPER, "goal": {"kv_cache_dtype": "fp8"}},
    ),
    *(
        (ALL, ANY, {"on": on, "goal": {"quantization": quantization}})
        for quantization, on in (
            ("nvfp4", BLACKWELL),
            ("mxfp4", HOPPER),
            ("fp8", Generation.ADA),
            ("bf16", Generation.AMPERE),
        )
    ),
    *(
        (("sglang", "vllm"), ANY, {"on": on, "goal": {"quantization": quantization}})
        for quantization, on in (("nvfp4", HOPPER), ("fp8_block", Generation.AMPERE))
    ),
]


@each_row(("engines", "decision", "options"), ALLOWED)
def test_what_a_release_launches_is_taken(
    engines: tuple[str, ...], decision: ServeDecision, options: Any
) -> None:
    assert [_refused(engine, decision, **options) for engine in engines] == [""] * len(engines)


@each_row(
    ("decision", "generation", "is_refused"),
    (
        (aggregated(**LOW_LATENCY, max_batched_tokens=1024), Generation.AMPERE, True),
        (aggregated(**LOW_LATENCY, max_batched_tokens=1024), HOPPER, False),
        (aggregated(**NORMAL), Generation.AMPERE, False),
        (aggregated(**ON_16, **NORMAL), Generation.AMPERE, True),
        (aggregated(**ON_16, **NORMAL), HOPPER, False),
        (aggregated(**ON_16), Generation.AMPERE, False),
    ),
)
def test_deepep_has_normal_kernels_of_one_machine_alone_on_a100(
    *, decision: ServeDecision, generation: Generation, is_refused: bool
) -> None:
    # setup.py of deepseek-ai/DeepEP builds SM80 without NVSHMEM and without low latency.
    lines = _refused("vllm", decision, on=generation)
    assert ("DeepEP is built for them" in lines) == is_refused


def test_the_kernels_have_a_cap_and_widths() -> None:
    assert LARGEST_DISPATCH_TOKENS == 1024
    assert DEEPSEEK.hidden_size in DEEPEP_HIDDEN_SIZES


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 512), st.integers(1, 16))
def test_machines_hold_equal_parts_and_are_no_more_than_needed(
    devices: int, devices_per_node: int
) -> None:
    nodes = nodes_needed(devices, devices_per_node=devices_per_node)
    assert devices % nodes == 0
    assert devices // nodes <= devices_per_node
    fewer = [n for n in range(1, nodes) if devices % n == 0 and devices // n <= devices_per_node]
    assert not fewer


# Prefill and decode instances of one deployment must be able to hand caches over.

HETEROGENEOUS = {"old": "h100", "new": "b200"}


def _serving(model: ModelSpec, engine: str, decision: ServeDecision) -> VerifiedServing:
    return sample_serving(model, decision, engine=engine, devices=HETEROGENEOUS)


def _between(one: dict[str, Any], other: dict[str, Any]) -> ServeDecision:
    pools = {"from_pool": "new", "to_pool": "old"}
    return disaggregated(prefill={"pool": "new", **one}, decode={"pool": "old", **other}, **pools)


@each_row(
    ("engine", "line"),
    [
        # Blackwell's default is 64 and Hopper's 1 where pages must be equal.
        ("sglang", "page sizes 64 (prefill) and 1 (decode) differ"),
        # 32 does not divide 16.
        ("vllm", "page sizes 32 (prefill) and 16 (decode): prefill's must divide decode's"),
        # FlashMLA's 64 on Hopper, 32 elsewhere.
        ("trtllm", "page sizes 32 (prefill) and 64 (decode) differ"),
    ],
)
def test_stated_pages_legalise_what_defaults_refuse(engine: str, line: str) -> None:
    (refused,) = unlaunchable(_serving(DEEPSEEK, engine, _between({}, {})))
    assert refused.startswith(f"{engine} ")
    assert f"new to old: {line}" in refused
    stated = _serving(DEEPSEEK, engine, _between({"page_size": 64}, {"page_size": 64}))
    assert not unlaunchable(stated)
    option = {
        "sglang": "--page-size 64",
        "vllm": "--block-size 64",
        "trtllm": "tokens_per_block: 64",
    }[engine]
    files = {str(file.path): file.text for file in emit_serving(engine, stated)}
    kind = "yaml" if engine == "trtllm" else "sh"
    assert all(option in files[f"{role}.{kind}"] for role in ("prefill", "decode"))


# 4 key-value heads: prefill over 8 ranks is wider than they are.
WIDE = {**TENSOR, "devices": 8, "ep": 8, "page_size": 64}
THIN = {"devices": 8, "attention_dp": 4, "attention_tp": 2, "ep": 8, "page_size": 64}
STAGES = {**WIDE, "devices": 16, "pp": 2}


@each_row(
    ("engine", "prefill", "decode", "line"),
    [
        ("vllm", WIDE, THIN, "the wider prefill exceeds 4 key-value heads"),
        ("vllm", THIN, WIDE, ""),
        ("vllm", STAGES, WIDE, "both must be 1"),
        ("sglang", STAGES, WIDE, ""),
        ("sglang", WIDE, STAGES, "decode's must be 1 or prefill's"),
    ],
)
def test_heads_and_pipelines_are_matched_as_the_connector_allows(
    engine: str, prefill: Any, decode: Any, line: str
) -> None:
    lines = "".join(unlaunchable(_serving(QWEN, engine, _between(prefill, decode))))
    assert line in lines
    assert bool(lines) == bool(line)


# Which release runs which of the models that moetune reads.


def test_models_of_releases_and_families_are_read() -> None:
    for family in (SPARSE, COMPRESSED, CHUNKED, HYBRID, ZERO_EXPERTS):
        assert family <= EVERY
    for release in EVERY_RELEASE:
        assert release.models.architectures <= EVERY
        for models in release.models.only_one.values():
            assert models <= release.models.architectures


@each_row(
    ("engine", "folder"),
    [
        *(
            ("vllm", folder)
            for folder in (
                "deepseek-v3.2",
                "deepseek-v4-flash",
                "kimi-k2.5",
                "kimi-linear-48b-a3b",
                "longcat-flash",
                "minimax-m2",
                "nemotron-3-super",
                "qwen3-next-80b-a3b",
                "qwen3.5-397b-a17b",
            )
        ),
        *(
            ("sglang", folder)
            for folder in ("deepseek-v4-flash", "glm-5", "longcat-flash", "nemotron-3-nano")
        ),
        *(("trtllm", folder) for folder in ("glm-5", "minimax-m2", "nemotron-3-nano")),
    ],
)
def test_releases_run_new_models(engine: str, folder: str) -> None:
    assert "does not run" not in _refused(engine, ANY, example_model(folder))


SOURCE = " (docs/source/models/supported-models.md, PyTorch backend)"


@each_row(
    ("engine", "folder", "degrees", "line", "is_said"),
    [
        (
            "trtllm",
            "kimi-linear-48b-a3b",
            {},
            "trtllm 1.3.0rc27: the release does not run KimiLinearForCausalLM; it runs"
            " NemotronHForCausalLM, Qwen3NextForCausalLM, Qwen3_5ForConditionalGeneration,"
            f" Qwen3_5MoeForConditionalGeneration{SOURCE}",
            True,
        ),
        (
            "trtllm",
            "longcat-flash",
            {},
            f"trtllm 1.3.0rc27: the release does not run LongcatFlashForCausalLM{SOURCE}",
            True,
        ),
        (
            "sglang",
            "qwen3-next-80b-a3b",
            {"devices": 16, "pp": 2},
            "pp 2: the release runs Qwen3NextForCausalLM with pp 1 only",
            True,
        ),
        ("sglang", "nemotron-3-nano", {"devices": 16, "pp": 2}, "pp 2", False),
        (
            "vllm",
            "nemotron-3-nano",
            {"devices": 16, "attention_tp": 16, "attention_dp": 1, "moe_tp": 1, "ep": 16},
            "does not divide the 8 key heads of linear attention",
            True,
        ),
        (
            "sglang",
            "longcat-flash",
            {"devices": 16, "pp": 2},
            "the release runs LongcatFlashForCausalLM with pp 1 only",
            True,
        ),
        ("vllm", "longcat-flash", {"devices": 16, "pp": 2}, "LongcatFlash", False),
    ],
)
def test_models_run_only_as_their_release_has_them(
    *, engine: str, folder: str, degrees: dict[str, Any], line: str, is_said: bool
) -> None:
    lines = _refused(engine, aggregated(**degrees), example_model(folder))
    assert (line in lines) == is_said
    assert degrees or lines == line


def test_zero_computation_experts_run_where_a_release_has_them() -> None:
    lacking = {
        (release.name, release.vendor)
        for release in EVERY_RELEASE
        if "LongcatFlashForCausalLM" not in release.models.architectures
    }
    assert lacking == {
        ("sglang", Vendor.HUAWEI),
        ("trtllm", Vendor.NVIDIA),
        ("vllm", Vendor.CPU),
        ("vllm", Vendor.HUAWEI),
    }


def test_some_models_run_on_some_devices() -> None:
    model = "DeepseekV4ForCausalLM"
    release = ENGINES["trtllm"][0].models
    group = aggregated().instances[0]
    lines = {
        generation: tuple(model_refusals(release, group, architecture=model, generation=generation))
        for generation in (Generation.HOPPER, Generation.BLACKWELL, None)
    }
    assert lines[Generation.HOPPER] == (
        f"the release runs DeepseekV4ForCausalLM on blackwell only{SOURCE}",
    )
    assert lines[Generation.BLACKWELL] == lines[None] == ()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_manifests_name_models_by_their_class(engine: str) -> None:
    release = ENGINES[engine][0]
    named = release.redundant_architectures | (release.a2a_architectures or frozenset())
    assert named | release.multiplexed_architectures <= release.models.architectures


# Releases are found by name, the newest without one.


def test_engines_of_a_goal_are_described_or_answered_with_those_that_are() -> None:
    assert set(ENGINES) == set(get_args(Engine.model_fields["name"].annotation))
    with pytest.raises(UnknownTargetError, match=r"no sglang '0.4' .* there is 0.5.23"):
        engine_manifest(Engine(name="sglang", version="0.4"))


@each_row("name", ENGINES)
def test_the_newest_release_is_the_default(name: str) -> None:
    newest = ENGINES[name][0]
    assert engine_manifest(Engine.model_validate({"name": name})) is newest
    named = Engine.model_validate({"name": name, "version": newest.release})
    assert engine_manifest(named) is newest


@each_row("name", ENGINES)
def test_every_precision_of_a_goal_has_a_word(name: str) -> None:
    fields = ServeGoal.model_fields
    every = set(get_args(fields["quantization"].annotation))
    # Kimi-K2 runs under TensorRT-LLM in NVFP4.
    assert set(ENGINES[name][0].quantization) == every - ({"int4"} if name == "trtllm" else set())
    assert set(ENGINES[name][0].kv_cache_dtype) == set(
        get_args(fields["kv_cache_dtype"].annotation)
    )


@each_row(
    ("engine", "name", "dtype", "word", "expected"),
    (
        ("sglang", "deepseek-v3.2", "bf16", "", "bfloat16"),
        ("sglang", "deepseek-v3.2", "fp8", "fp8_e4m3", "fp8_e4m3"),
        ("sglang", "deepseek-v3", "bf16", "", ""),
        ("vllm", "glm-5", "bf16", "", "bfloat16"),
        ("vllm", "deepseek-v4-flash", "bf16", "", ""),
        ("trtllm", "deepseek-v3", "bf16", "auto", "auto"),
    ),
)
def test_a_cache_in_bf16_is_stated_where_the_engine_would_take_another(
    engine: str, name: str, dtype: str, word: str, expected: str
) -> None:
    model = example_model(name)
    traits = ENGINE_TRAITS[engine]
    assert traits.cache_word(model, dtype=dtype, word=word) == expected
    asks = model.model_copy(update={"released_cache": "fp8"})
    is_sure = dtype == "fp8" or model.attention.kind == "shared_kv"
    assert traits.cache_word(asks, dtype=dtype, word=word) == (word if is_sure else "bfloat16")


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 2000), st.integers(0, 16))
def test_a_decode_step_sends_every_draft_and_one_token_more(batch: int, drafts: int) -> None:
    group = sample_instances(Role.DECODE, max_batch=batch, draft_tokens=drafts, **LOW_LATENCY)
    for engine in ALL:
        assert dispatch_tokens(ENGINES[engine][0], group) == batch * (drafts + 1)


@each_row(("device", "said"), (("h100", True), ("b200", False)))
def test_scripts_say_where_weights_are_unpacked(*, device: str, said: bool) -> None:
    verified = sample_serving(
        DEEPSEEK, ANY, goal={"quantization": "nvfp4"}, devices={"h100": device}
    )
    files = {str(file.path): file.text for file in emit_serving("sglang", verified)}
    assert ("has no tensor cores for nvfp4" in files["aggregated.sh"]) == said
