"""Prefill and decode instances of one deployment must be able to hand caches over."""

from pathlib import Path
from typing import Any

import pytest

from tests.rows import each_row
from tests.tuner.engines.serving.testing import disaggregated, sample_serving
from tuner.config.serve import ServeDecision
from tuner.engines.serve_writers import emit_serving, unlaunchable
from tuner.plans.serve import VerifiedServing
from tuner.spec.huggingface.read import read_model
from tuner.spec.model import ModelSpec

EXAMPLES = Path(__file__).parents[4] / "examples/models"
HETEROGENEOUS = {"old": "h100", "new": "b200"}


@pytest.fixture(scope="module")
def deepseek() -> ModelSpec:
    return read_model(EXAMPLES / "deepseek-v3/config.json")


@pytest.fixture(scope="module")
def qwen() -> ModelSpec:
    return read_model(EXAMPLES / "qwen3-235b-a22b/config.json")


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


def test_heads_are_cut_only_as_the_connector_allows(qwen: ModelSpec) -> None:
    # 4 key-value heads: prefill over 8 ranks is wider than they are.
    wide = {"devices": 8, "attention_dp": 1, "attention_tp": 8, "ep": 8, "page_size": 64}
    thin = {"devices": 8, "attention_dp": 4, "attention_tp": 2, "ep": 8, "page_size": 64}
    (line,) = unlaunchable(_serving(qwen, "vllm", _between(wide, thin)))
    assert "the wider prefill exceeds 4 key-value heads" in line
    assert not unlaunchable(_serving(qwen, "vllm", _between(thin, wide)))


def test_pipelines_are_matched_as_the_connector_allows(qwen: ModelSpec) -> None:
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
