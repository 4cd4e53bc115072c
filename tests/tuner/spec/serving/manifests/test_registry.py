"""Releases are found by name, the newest without one."""

from typing import get_args

import pytest

from tuner.errors import UnknownTargetError
from tuner.spec.serving.goal import Engine, ServeGoal
from tuner.spec.serving.manifests.registry import ENGINES, manifest_of


def test_every_engine_of_a_goal_is_described() -> None:
    assert set(ENGINES) == set(get_args(Engine.model_fields["name"].annotation))


@pytest.mark.parametrize("name", ENGINES)
def test_the_newest_release_stands_for_none(name: str) -> None:
    newest = ENGINES[name][0]
    assert manifest_of(Engine.model_validate({"name": name})) is newest
    named = Engine.model_validate({"name": name, "version": newest.release})
    assert manifest_of(named) is newest


def test_a_release_that_is_not_described_is_answered_with_those_that_are() -> None:
    with pytest.raises(UnknownTargetError, match=r"no sglang '0.4' .* there is 0.5.23"):
        manifest_of(Engine(name="sglang", version="0.4"))


@pytest.mark.parametrize("name", ENGINES)
def test_every_precision_of_a_goal_has_a_word(name: str) -> None:
    fields = ServeGoal.model_fields
    assert set(ENGINES[name][0].quantization) == set(get_args(fields["quantization"].annotation))
    assert set(ENGINES[name][0].kv_cache_dtype) == set(
        get_args(fields["kv_cache_dtype"].annotation)
    )
