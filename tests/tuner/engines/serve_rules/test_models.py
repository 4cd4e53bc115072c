"""Which release runs which of the models that moetune reads."""

from pathlib import Path

import pytest

from tests.rows import each_row
from tests.tuner.engines.serving.testing import aggregated, sample_serving
from tuner.devices.datasheet import Generation, Vendor
from tuner.engines.registry import serve_releases
from tuner.engines.serve_capabilities import ENGINES
from tuner.engines.serve_rules.models import (
    CHUNKED,
    COMPRESSED,
    EVERY,
    HYBRID,
    SPARSE,
    ZERO_EXPERTS,
    model_refusals,
)
from tuner.engines.serve_rules.rules import refusals
from tuner.spec.huggingface.read import read_model

MODELS = Path(__file__).parents[4] / "examples" / "models"


def refused(engine: str, folder: str, **degrees: int) -> tuple[str, ...]:
    model, decision = read_model(MODELS / folder), aggregated(**degrees)
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


def test_a_model_that_a_release_lacks_is_refused_in_one_line() -> None:
    assert refused("trtllm", "kimi-linear-48b-a3b") == (
        "trtllm 1.3.0rc27: the release does not run KimiLinearForCausalLM; it runs"
        " NemotronHForCausalLM, Qwen3NextForCausalLM, Qwen3_5ForConditionalGeneration,"
        " Qwen3_5MoeForConditionalGeneration"
        " (docs/source/models/supported-models.md, PyTorch backend)",
    )


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


def test_some_models_run_in_one_stage() -> None:
    (line,) = [
        line
        for line in refused("sglang", "qwen3-next-80b-a3b", devices=16, pp=2)
        if "Qwen3NextForCausalLM" in line
    ]
    assert "pp 2: the release runs Qwen3NextForCausalLM with pp 1 only" in line
    assert not any(
        "pp 2" in line for line in refused("sglang", "nemotron-3-nano", devices=16, pp=2)
    )


def test_key_heads_of_linear_attention_divide() -> None:
    lines = refused(
        "vllm", "nemotron-3-nano", devices=16, attention_tp=16, attention_dp=1, moe_tp=1, ep=16
    )
    assert any("does not divide the 8 key heads of linear attention" in line for line in lines)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_manifests_name_models_by_their_class(engine: str) -> None:
    release = ENGINES[engine][0]
    named = release.redundant_architectures | (release.a2a_architectures or frozenset())
    assert named | release.shared_device_architectures <= release.models.architectures
