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
from tuner.config.serve import Role, ServeDecision
from tuner.devices.datasheet import Generation, Vendor
from tuner.engines.registry import serve_releases, serve_traits
from tuner.engines.serve_capabilities import ENGINES, engine_manifest, modes_on
from tuner.engines.serve_rules.manifest import DEEPEP_HIDDEN_SIZES, LARGEST_DISPATCH_TOKENS
from tuner.engines.serve_rules.models import (
    CHUNKED,
    COMPRESSED,
    EVERY,
    HYBRID,
    SPARSE,
    ZERO_EXPERTS,
    model_refusals,
)
from tuner.engines.serve_rules.rules import group_refusals, nodes_needed, refusals
from tuner.engines.serve_rules.steps import dispatch_tokens
from tuner.engines.serve_writers import emit_serving, unlaunchable
from tuner.errors import UnknownTargetError
from tuner.plans.serve import VerifiedServing
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.model import ModelSpec
from tuner.spec.serving.goal import Engine, ServeGoal

ALL = tuple(ENGINES)
ON_16: dict[str, Any] = {"devices": 16, "attention_dp": 16, "ep": 16}
ON_12: dict[str, Any] = {"devices": 12, "attention_dp": 12, "ep": 12}


@pytest.fixture(scope="module")
def deepseek() -> ModelSpec:
    return example_model("deepseek-v3")


def _refused(
    engine: str,
    decision: ServeDecision,
    model: ModelSpec,
    *,
    devices_per_node: int = 8,
    **goal: Any,
) -> str:
    plan = sample_serving(model, decision, engine=engine, goal=goal).plan
    lines = refusals(
        ENGINES[engine][0],
        decision,
        model=model,
        goal=plan.goal,
        devices_per_node=dict.fromkeys(
            (group.pool for group in decision.instances), devices_per_node
        ),
    )
    return "\n".join(lines)


@each_row("engine", ALL)
@each_row("decision", [aggregated(), disaggregated()])
def test_plain_deployments_are_taken(
    engine: str, decision: ServeDecision, deepseek: ModelSpec
) -> None:
    assert not _refused(engine, decision, deepseek)


CASES: list[tuple[str, tuple[str, ...], ServeDecision]] = [
    (
        "experts are on all 8 devices",
        ALL,
        aggregated(ep=1, moe_tp=1),
    ),
    (
        "every device is a data-parallel rank",
        ("trtllm",),
        aggregated(attention_tp=2, attention_dp=4),
    ),
    ("experts are split or not", ("vllm",), aggregated(moe_tp=2, ep=4)),
    (
        "deepep_normal needs moe_tp 1 and ep above 1",
        ALL,
        aggregated(moe_tp=8, ep=1, a2a_backend="deepep_normal"),
    ),
    (
        "deepep_normal needs attention_dp above 1",
        ("vllm", "trtllm"),
        aggregated(attention_tp=8, attention_dp=1, a2a_backend="deepep_normal"),
    ),
    (
        "1024 tokens per rank and step at most, not 2048",
        ALL,
        disaggregated(decode={"max_batch": 2048, "a2a_backend": "deepep_low_latency"}),
    ),
    (
        # vLLM's prompts go through the same buffers; the others' do not.
        "1024 tokens per rank and step at most, not 8192",
        ("vllm",),
        aggregated(a2a_backend="deepep_low_latency"),
    ),
    (
        "without chunked prefill max_batched_tokens 2048 must reach the longest request, 8192",
        ("vllm", "trtllm"),
        aggregated(chunked_prefill=False, max_batched_tokens=2048),
    ),
    (
        "max_batched_tokens 32 is below max_batch 64",
        ("vllm",),
        aggregated(max_batched_tokens=32),
    ),
    (
        "a data-parallel rank of attention_tp 16 x pp 1 must fit the 8 devices of a machine",
        ("vllm",),
        aggregated(devices=32, attention_tp=16, attention_dp=2, ep=32),
    ),
    ("cannot pass through host memory", ("sglang", "trtllm"), disaggregated(path="host")),
    (
        "connector mooncake cannot pass through host memory; nixl can",
        ("vllm",),
        disaggregated(path="host", connector="mooncake"),
    ),
    ("connector none is not one of nixl, mooncake", ALL, disaggregated(connector="none")),
]


@each_row("engine", ALL)
@each_row(("line", "by", "decision"), CASES)
def test_what_a_release_cannot_launch_is_refused(
    line: str, by: tuple[str, ...], decision: ServeDecision, engine: str, deepseek: ModelSpec
) -> None:
    assert (line in _refused(engine, decision, deepseek)) == (engine in by)


@each_row("engine", ALL)
def test_experts_must_divide(engine: str, deepseek: ModelSpec) -> None:
    decision = aggregated(**ON_12)
    refused = _refused(engine, decision, deepseek)
    assert "ep 12 does not divide 256 experts; ep 8 or 16 does" in refused
    assert "or redundant_experts 8" in refused
    assert not _refused(engine, aggregated(**ON_12, redundant_experts=8), deepseek)
    assert "256 experts with 9 redundant" in _refused(
        engine, aggregated(**ON_12, redundant_experts=9), deepseek
    )


@each_row("engine", ALL)
def test_copies_of_experts_need_what_the_release_wants(engine: str, deepseek: ModelSpec) -> None:
    on_one = aggregated(attention_dp=1, attention_tp=8, moe_tp=8, ep=1, redundant_experts=8)
    assert "redundant_experts 8 need ep above 1" in _refused(engine, on_one, deepseek)
    tensor = aggregated(attention_dp=1, attention_tp=8, redundant_experts=8)
    wants_data = "need attention_dp above 1" in _refused(engine, tensor, deepseek)
    assert wants_data == (engine == "trtllm")
    without = "qwen3-next-80b-a3b" if engine == "trtllm" else "olmoe-1b-7b"
    model = example_model(without)
    assert f"{model.architecture} has no redundant experts" in _refused(
        engine, aggregated(redundant_experts=8), model
    )


@each_row("engine", ALL)
def test_deepeps_kernels_for_many_tokens_run_on_some_numbers_of_ranks(
    deepseek: ModelSpec, engine: Any
) -> None:
    wide = {"devices": 72, "attention_dp": 72, "ep": 72, "redundant_experts": 32}
    line = "DeepEP's normal kernels run on"
    normal = aggregated(**wide, a2a_backend="deepep_normal")
    assert line in _refused(engine, normal, deepseek)
    low = {**wide, "a2a_backend": "deepep_low_latency", "max_batched_tokens": 1024}
    # Prompts of an aggregated instance are no business of low latency in SGLang.
    assert (line in _refused(engine, aggregated(**low), deepseek)) == (engine == "sglang")
    assert line not in _refused(engine, disaggregated(decode=low), deepseek)


def test_deepep_has_normal_kernels_of_one_machine_alone_on_a100(deepseek: ModelSpec) -> None:
    # setup.py of deepseek-ai/DeepEP builds SM80 without NVSHMEM and without low latency.
    low = {"a2a_backend": "deepep_low_latency", "max_batched_tokens": 1024}
    rows = (
        (aggregated(**low), Generation.AMPERE, True),
        (aggregated(**low), Generation.HOPPER, False),
        (aggregated(a2a_backend="deepep_normal"), Generation.AMPERE, False),
        (aggregated(**ON_16, a2a_backend="deepep_normal"), Generation.AMPERE, True),
        (aggregated(**ON_16, a2a_backend="deepep_normal"), Generation.HOPPER, False),
        (aggregated(**ON_16), Generation.AMPERE, False),
    )
    for decision, generation, is_refused in rows:
        (group,) = decision.instances
        lines = group_refusals(
            ENGINES["vllm"][0],
            group,
            model=deepseek,
            goal=sample_serving(deepseek, decision, engine="vllm").plan.goal,
            devices_per_node=8,
            generation=generation,
        )
        assert any("DeepEP is built for them" in one for one in lines) == is_refused, group


@each_row("engine", ALL)
def test_a_model_without_experts_spreads_none(engine: str) -> None:
    dense = example_model("llama-3.1-8b")
    assert "of a model without experts must be 1" in _refused(engine, aggregated(), dense)
    plain = aggregated(attention_dp=1, attention_tp=8, ep=1)
    assert not _refused(engine, plain, dense)


@each_row("engine", ALL)
def test_low_latency_kernels_exist_for_some_widths(engine: str, deepseek: ModelSpec) -> None:
    assert deepseek.hidden_size in DEEPEP_HIDDEN_SIZES
    narrow = deepseek.model_copy(update={"hidden_size": 2880})
    decision = disaggregated(decode={"a2a_backend": "deepep_low_latency"})
    assert "not 2880" in _refused(engine, decision, narrow)
    assert "hidden sizes" not in _refused(engine, decision, deepseek)


@each_row("engine", ALL)
def test_modes_are_made_of_their_roles(engine: str, deepseek: ModelSpec) -> None:
    (group,) = aggregated().instances
    decision = ServeDecision(
        mode="disaggregated", instances=(group,), handovers=disaggregated().handovers
    )
    assert "has roles decode and prefill, the decision of aggregated" in _refused(
        engine, decision, deepseek
    )


@each_row("engine", ALL)
def test_a_kv_transfer_with_one_connector_is_needed(engine: str, deepseek: ModelSpec) -> None:
    good = disaggregated()
    none = good.model_copy(update={"handovers": ()})
    assert "the KV transfers name none" in _refused(engine, none, deepseek)
    (transfer,) = good.handovers
    other = transfer.model_copy(update={"connector": "mooncake"})
    both = good.model_copy(update={"handovers": (transfer, other)})
    assert "['mooncake', 'nixl']" in _refused(engine, both, deepseek)


def test_the_cap_is_that_of_the_kernels_tag() -> None:
    assert LARGEST_DISPATCH_TOKENS == 1024


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


def test_experts_in_int4_are_fed_by_deepep_where_a_release_has_such_kernels() -> None:
    kimi = example_model("kimi-k2.5")
    spread = aggregated(moe_tp=1, ep=8, attention_tp=1, attention_dp=8)
    normal = spread.model_copy(
        update={
            "instances": tuple(
                one.model_copy(update={"a2a_backend": "deepep_normal"}) for one in spread.instances
            )
        }
    )
    for engine, decision, expected in (
        ("vllm", normal, ""),
        ("vllm", spread, ""),
        ("sglang", normal, "a2a_backend deepep_normal does not feed experts in int4"),
        ("sglang", spread, ""),
        ("trtllm", spread, "quantization int4 is not one of bf16, fp8"),
    ):
        refused = _refused(engine, decision, kimi, quantization="int4")
        assert expected in refused, (engine, refused)
        assert bool(refused) == bool(expected), (engine, refused)


# Prefill and decode instances of one deployment must be able to hand caches over.

HETEROGENEOUS = {"old": "h100", "new": "b200"}


@pytest.fixture(scope="module")
def qwen() -> ModelSpec:
    return example_model("qwen3-235b-a22b")


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
def test_stated_pages_legalise_what_defaults_refuse(
    engine: str, line: str, deepseek: ModelSpec
) -> None:
    (refused,) = unlaunchable(_serving(deepseek, engine, _between({}, {})))
    assert refused.startswith(f"{engine} ")
    assert f"new to old: {line}" in refused
    stated = _serving(deepseek, engine, _between({"page_size": 64}, {"page_size": 64}))
    assert not unlaunchable(stated)
    option = {
        "sglang": "--page-size 64",
        "vllm": "--block-size 64",
        "trtllm": "tokens_per_block: 64",
    }[engine]
    files = {str(file.path): file.text for file in emit_serving(engine, stated)}
    kind = "yaml" if engine == "trtllm" else "sh"
    assert all(option in files[f"{role}.{kind}"] for role in ("prefill", "decode"))


def test_heads_and_pipelines_are_matched_as_the_connector_allows(qwen: ModelSpec) -> None:
    # 4 key-value heads: prefill over 8 ranks is wider than they are.
    wide = {"devices": 8, "attention_dp": 1, "attention_tp": 8, "ep": 8, "page_size": 64}
    thin = {"devices": 8, "attention_dp": 4, "attention_tp": 2, "ep": 8, "page_size": 64}
    (line,) = unlaunchable(_serving(qwen, "vllm", _between(wide, thin)))
    assert "the wider prefill exceeds 4 key-value heads" in line
    assert not unlaunchable(_serving(qwen, "vllm", _between(thin, wide)))
    stages = {
        "devices": 16,
        "attention_dp": 1,
        "attention_tp": 8,
        "ep": 8,
        "pp": 2,
        "page_size": 64,
    }
    same = {"devices": 8, "attention_dp": 1, "attention_tp": 8, "ep": 8, "page_size": 64}
    assert "both must be 1" in "".join(unlaunchable(_serving(qwen, "vllm", _between(stages, same))))
    assert not unlaunchable(_serving(qwen, "sglang", _between(stages, same)))
    assert "decode's must be 1 or prefill's" in "".join(
        unlaunchable(_serving(qwen, "sglang", _between(same, stages)))
    )


# Which release runs which of the models that moetune reads.


def refused(engine: str, folder: str, **degrees: int) -> tuple[str, ...]:
    model, decision = example_model(folder), aggregated(**degrees)
    plan = sample_serving(model, decision, engine=engine).plan
    return refusals(
        ENGINES[engine][0],
        decision,
        model=model,
        goal=plan.goal,
        devices_per_node={group.pool: 8 for group in decision.instances},
    )


def test_models_of_releases_and_families_are_read() -> None:
    for family in (SPARSE, COMPRESSED, CHUNKED, HYBRID, ZERO_EXPERTS):
        assert family <= EVERY
    for release in serve_releases():
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
    assert not any("does not run" in line for line in refused(engine, folder))


def test_models_run_only_as_their_release_has_them() -> None:
    assert refused("trtllm", "kimi-linear-48b-a3b") == (
        "trtllm 1.3.0rc27: the release does not run KimiLinearForCausalLM; it runs"
        " NemotronHForCausalLM, Qwen3NextForCausalLM, Qwen3_5ForConditionalGeneration,"
        " Qwen3_5MoeForConditionalGeneration"
        " (docs/source/models/supported-models.md, PyTorch backend)",
    )
    (line,) = [
        line
        for line in refused("sglang", "qwen3-next-80b-a3b", devices=16, pp=2)
        if "Qwen3NextForCausalLM" in line
    ]
    assert "pp 2: the release runs Qwen3NextForCausalLM with pp 1 only" in line
    assert not any(
        "pp 2" in line for line in refused("sglang", "nemotron-3-nano", devices=16, pp=2)
    )
    lines = refused(
        "vllm", "nemotron-3-nano", devices=16, attention_tp=16, attention_dp=1, moe_tp=1, ep=16
    )
    assert any("does not divide the 8 key heads of linear attention" in line for line in lines)


def test_zero_computation_experts_run_where_a_release_has_them() -> None:
    assert refused("trtllm", "longcat-flash") == (
        "trtllm 1.3.0rc27: the release does not run LongcatFlashForCausalLM"
        " (docs/source/models/supported-models.md, PyTorch backend)",
    )
    lacking = {
        (release.name, release.vendor)
        for release in serve_releases()
        if "LongcatFlashForCausalLM" not in release.models.architectures
    }
    assert lacking == {
        ("sglang", Vendor.HUAWEI),
        ("trtllm", Vendor.NVIDIA),
        ("vllm", Vendor.CPU),
        ("vllm", Vendor.HUAWEI),
    }
    lines = refused("sglang", "longcat-flash", devices=16, pp=2)
    assert any("the release runs LongcatFlashForCausalLM with pp 1 only" in line for line in lines)
    lines = refused("vllm", "longcat-flash", devices=16, pp=2)
    assert not any("LongcatFlash" in line for line in lines)


def test_some_models_run_on_some_devices() -> None:
    model = "DeepseekV4ForCausalLM"
    release = ENGINES["trtllm"][0].models
    group = aggregated().instances[0]
    lines = {
        generation: tuple(model_refusals(release, group, architecture=model, generation=generation))
        for generation in (Generation.HOPPER, Generation.BLACKWELL, None)
    }
    assert lines[Generation.HOPPER] == (
        "the release runs DeepseekV4ForCausalLM on blackwell only"
        " (docs/source/models/supported-models.md, PyTorch backend)",
    )
    assert lines[Generation.BLACKWELL] == lines[None] == ()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_manifests_name_models_by_their_class(engine: str) -> None:
    release = ENGINES[engine][0]
    named = release.redundant_architectures | (release.a2a_architectures or frozenset())
    assert named | release.shared_device_architectures <= release.models.architectures


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


@each_row("afd", ("a", "b"))
def test_the_modes_of_pools_are_those_of_any_of_their_releases(afd: str) -> None:
    pools = tuple(
        Pool(name=name, device="h100-sxm", nodes=1, devices_per_node=8) for name in ("a", "b")
    )
    goal = ServeGoal.model_validate(
        {
            "kind": "serve",
            "engine": {"name": "vllm"},
            "engines": {afd: {"name": "vllm", "version": "0.30.0+afd"}},
            "traffic": {"rate": 1.0, "input_tokens": 100, "output_tokens": 10},
        }
    )
    assert "attention_expert" in modes_on(goal, Cluster(pools=pools))
    own = tuple(pool for pool in pools if pool.name != afd)
    assert "attention_expert" not in modes_on(goal, Cluster(pools=own))


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
    traits = serve_traits()[engine]
    assert traits.cache_word(model, dtype=dtype, word=word) == expected
    asks = model.model_copy(update={"released_cache": "fp8"})
    is_sure = dtype == "fp8" or model.attention.kind == "shared_kv"
    asked = traits.cache_word(asks, dtype=dtype, word=word)
    assert asked == (word if is_sure else "bfloat16")


# What a step may hold: drafts, halves, pages and shares of a device.

MTP = {"speculative": {"method": "mtp", "draft_tokens": 3, "acceptance": 0.8}}
EAGLE = {"speculative": {"method": "eagle", "draft_tokens": 3, "acceptance": 0.8}}
LOW_LATENCY: dict[str, Any] = {"a2a_backend": "deepep_low_latency"}


@pytest.fixture(scope="module")
def mixtral() -> ModelSpec:
    return example_model("mixtral-8x7b")


def _refuses(
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
    assert not _refuses(engine, fits, deepseek, MTP)
    more = disaggregated(decode={**LOW_LATENCY, "max_batch": 257, "draft_tokens": 3})
    line = "1024 tokens per rank and step at most, not 1028; lower the batch or the drafts"
    assert line in _refuses(engine, more, deepseek, MTP)


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
    assert not _refuses(engine, decision, deepseek, MTP)
    assert "need goal.speculative with the method" in _refuses(engine, decision, deepseek)
    assert "Qwen3MoeForCausalLM has no MTP layers" in _refuses(engine, decision, qwen, MTP)
    # Its config leaves out the layer of its checkpoint.
    hybrid = example_model("qwen3-next-80b-a3b")
    assert "no MTP layers" not in _refuses(engine, decision, hybrid, MTP)
    eagle = _refuses(engine, decision, qwen, EAGLE)
    assert ("drafting by eagle is not one of mtp" in eagle) == (engine == "trtllm")


def test_drafts_cross_stages_and_fill_steps_as_each_release_says(deepseek: ModelSpec) -> None:
    wide = {"devices": 16, "attention_dp": 1, "attention_tp": 8, "pp": 2, "draft_tokens": 3}
    refused = {engine for engine in ALL if _refuses(engine, aggregated(**wide), deepseek, MTP)}
    assert refused == {"sglang", "trtllm"}
    decision = aggregated(max_batched_tokens=128, draft_tokens=3)
    line = "max_batched_tokens 128 is below max_batch 64 x 4 tokens"
    assert line in _refuses("vllm", decision, deepseek, MTP)


@each_row("engine", ALL)
def test_decode_groups_draft_equally_many_tokens(engine: str, deepseek: ModelSpec) -> None:
    one = disaggregated(decode={"draft_tokens": 3})
    plain = sample_instances(Role.DECODE, count=1)
    both = one.model_copy(update={"instances": (*one.instances, plain)})
    assert "decode groups draft 0 and 3 tokens" in _refuses(engine, both, deepseek, MTP)


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
    lines = _refuses(engine, aggregated(two_batch_overlap=True, **changes), deepseek)
    assert line in lines
    assert bool(lines) == bool(line)


def test_sglang_builds_deepep_into_some_models(mixtral: ModelSpec, qwen: ModelSpec) -> None:
    decision = aggregated(a2a_backend="deepep_normal")
    assert "is not built into the experts of MixtralForCausalLM" in _refuses(
        "sglang", decision, mixtral
    )
    assert not _refuses("sglang", decision, qwen)
    assert not _refuses("vllm", decision, mixtral)


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
    lines = _refuses(engine, aggregated(page_size=page), deepseek, generation=generation)
    assert line in lines
    assert bool(lines) == bool(line), lines


def test_fp8_latent_caches_need_the_pages_of_flashmla(deepseek: ModelSpec) -> None:
    fp8 = {"kv_cache_dtype": "fp8"}
    assert "multiples of 64" in _refuses("vllm", aggregated(page_size=16), deepseek, fp8)
    assert not _refuses("vllm", aggregated(page_size=128), deepseek, fp8)


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
@each_row("engine", ALL)
def test_weights_without_units_are_refused_or_unpacked(
    quantization: str, generation: Generation, has_units: bool, deepseek: ModelSpec, engine: Any
) -> None:
    goal = {"quantization": quantization}
    lines = _refuses(engine, aggregated(), deepseek, goal, generation=generation)
    assert bool(lines) == (engine == "trtllm" and not has_units)
    assert not lines or f"not {generation}" in lines


@each_row(("device", "said"), (("h100", True), ("b200", False)))
def test_scripts_say_where_weights_are_unpacked(
    *, deepseek: ModelSpec, device: str, said: bool
) -> None:
    verified = sample_serving(
        deepseek, aggregated(), goal={"quantization": "nvfp4"}, devices={"h100": device}
    )
    files = {str(file.path): file.text for file in emit_serving("sglang", verified)}
    assert ("has no tensor cores for nvfp4" in files["aggregated.sh"]) == said


def test_shared_devices_are_sglangs_for_some_models(
    qwen: ModelSpec, deepseek: ModelSpec, mixtral: ModelSpec
) -> None:
    assert not _refuses("sglang", shared_device(), qwen)
    for model in (deepseek, mixtral):
        lines = _refuses("sglang", shared_device(), model)
        assert f"{model.architecture} has no layer-by-layer prefill beside decode" in lines
    for engine in ("vllm", "trtllm"):
        lines = _refuses(engine, shared_device(), qwen)
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
    assert line in _refuses("sglang", shared_device(**changes), qwen)


@each_row("engine", ALL)
@each_row("mode", ["attention_expert", "prefill_offload"])
def test_modes_without_a_launcher_say_why(engine: str, mode: str, deepseek: ModelSpec) -> None:
    decision = aggregated().model_copy(update={"mode": mode})
    lines = _refuses(engine, decision, deepseek)
    assert f"mode {mode} is not one of" in lines
    assert {
        "attention_expert": "has no attention-FFN disaggregation",
        "prefill_offload": "cached in part",
    }[mode] in lines
    assert len(lines.splitlines()) == 1
