"""What each release refuses, with the value, the rule and the way out in the line."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tests.tuner.engines.serving.testing import aggregated, disaggregated, sample_serving
from tuner.config.serve import ServeDecision
from tuner.devices.datasheet import Generation
from tuner.engines.serve_capabilities import ENGINES
from tuner.engines.serve_rules.manifest import DEEPEP_HIDDEN_SIZES, LARGEST_DISPATCH_TOKENS
from tuner.engines.serve_rules.rules import group_refusals, nodes_needed, refusals
from tuner.spec.huggingface.read import read_model
from tuner.spec.model import ModelSpec

EXAMPLES = Path(__file__).parents[4] / "examples/models"
ALL = tuple(ENGINES)
ON_16: dict[str, Any] = {"devices": 16, "attention_dp": 16, "ep": 16}
ON_12: dict[str, Any] = {"devices": 12, "attention_dp": 12, "ep": 12}


@pytest.fixture(scope="module")
def deepseek() -> ModelSpec:
    return read_model(EXAMPLES / "deepseek-v3/config.json")


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
    model = read_model(EXAMPLES / without / "config.json")
    assert f"{model.architecture} has no redundant experts" in _refused(
        engine, aggregated(redundant_experts=8), model
    )


def test_deepeps_kernels_for_many_tokens_run_on_some_numbers_of_ranks(deepseek: ModelSpec) -> None:
    wide = {"devices": 72, "attention_dp": 72, "ep": 72, "redundant_experts": 32}
    line = "DeepEP's normal kernels run on"
    for engine in ALL:
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
    dense = read_model(EXAMPLES / "llama-3.1-8b/config.json")
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
    kimi = read_model(EXAMPLES / "kimi-k2.5")
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
