"""Releases are found by name, the newest without one."""

from typing import get_args

import pytest

from tests.rows import each_row
from tuner.engines.serve_capabilities import ENGINES, engine_manifest, modes_on
from tuner.errors import UnknownTargetError
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.serving.goal import Engine, ServeGoal


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
