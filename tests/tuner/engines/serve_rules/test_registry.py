"""Releases are found by name, the newest without one."""

from pathlib import Path
from typing import get_args

import pytest

from tests.rows import Failures, each_row
from tuner.engines.registry import serve_traits
from tuner.engines.serve_capabilities import ENGINES, engine_manifest, modes_on
from tuner.errors import UnknownTargetError
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.huggingface.read import read_model
from tuner.spec.serving.goal import Engine, ServeGoal

MODELS = Path(__file__).parents[4] / "examples" / "models"


def test_every_engine_of_a_goal_is_described() -> None:
    assert set(ENGINES) == set(get_args(Engine.model_fields["name"].annotation))


@each_row("name", ENGINES)
def test_the_newest_release_is_the_default(name: str) -> None:
    newest = ENGINES[name][0]
    assert engine_manifest(Engine.model_validate({"name": name})) is newest
    named = Engine.model_validate({"name": name, "version": newest.release})
    assert engine_manifest(named) is newest


def test_a_release_that_is_not_described_is_answered_with_those_that_are() -> None:
    with pytest.raises(UnknownTargetError, match=r"no sglang '0.4' .* there is 0.5.23"):
        engine_manifest(Engine(name="sglang", version="0.4"))


@each_row("name", ENGINES)
def test_every_precision_of_a_goal_has_a_word(name: str) -> None:
    fields = ServeGoal.model_fields
    every = set(get_args(fields["quantization"].annotation))
    # Kimi-K2 runs under TensorRT-LLM in NVFP4.
    assert set(ENGINES[name][0].quantization) == every - ({"int4"} if name == "trtllm" else set())
    assert set(ENGINES[name][0].kv_cache_dtype) == set(
        get_args(fields["kv_cache_dtype"].annotation)
    )


def test_the_modes_of_pools_are_those_of_any_of_their_releases() -> None:
    pools = tuple(
        Pool(name=name, device="h100-sxm", nodes=1, devices_per_node=8) for name in ("a", "b")
    )
    for afd in ("a", "b"):
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


def test_a_cache_in_bf16_is_stated_where_the_engine_would_take_another() -> None:
    failures = Failures()
    for engine, name, dtype, word, expected in (
        ("sglang", "deepseek-v3.2", "bf16", "", "bfloat16"),
        ("sglang", "deepseek-v3.2", "fp8", "fp8_e4m3", "fp8_e4m3"),
        ("sglang", "deepseek-v3", "bf16", "", ""),
        ("vllm", "glm-5", "bf16", "", "bfloat16"),
        ("vllm", "deepseek-v4-flash", "bf16", "", ""),
        ("trtllm", "deepseek-v3", "bf16", "auto", "auto"),
    ):
        model = read_model(MODELS / name)
        with failures.of(engine, name, dtype):
            traits = serve_traits()[engine]
            assert traits.cache_word(model, dtype=dtype, word=word) == expected
            asks = model.model_copy(update={"released_cache": "fp8"})
            is_sure = dtype == "fp8" or model.attention.kind == "shared_kv"
            asked = traits.cache_word(asks, dtype=dtype, word=word)
            assert asked == (word if is_sure else "bfloat16")
    failures.check()
