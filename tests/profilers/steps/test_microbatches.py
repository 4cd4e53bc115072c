"""Micro-batches that differ between data ranks, and what a configuration writes and refuses."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from profilers.steps.config import StepConfig

Fields = dict[str, Any]


def test_microbatches_that_cannot_be_run_are_refused(tiny_config: Callable[..., Fields]) -> None:
    cases: list[tuple[Fields, str]] = [
        ({"data": 3, "microbatches": [2, 1]}, "a count for each of 3 data ranks"),
        ({"data": 3, "microbatches": [2, 2, 1]}, "with 4 (global_batch_size / micro_batch_size)"),
        ({"data": 2, "microbatches": [4, 0]}, "greater than or equal to 1"),
        ({"data": 2, "pipeline": 2, "expert": 2, "microbatches": [3, 1]}, "not [3, 1]"),
        (
            {"data": 2, "pipeline": 2, "virtual": 2, "microbatches": [6, 2], "micro_batch_size": 1},
            "virtual_pipeline 1",
        ),
    ]
    wrong = []
    for changed, said in cases:
        with pytest.raises(ValidationError) as error:
            StepConfig.model_validate(tiny_config(**changed))
        if said not in str(error.value):
            wrong.append(f"{said!r} expected, not {error.value}")
    assert not wrong


def test_fields_that_say_nothing_are_not_written(tiny_config: Callable[..., Fields]) -> None:
    written = StepConfig.model_validate(tiny_config()).model_dump()
    assert not {"adapters", "microbatches"} & set(written)
    config = StepConfig.model_validate(tiny_config(data=2, microbatches=[3, 1]))
    assert StepConfig.model_validate_json(config.model_dump_json()) == config
    assert [config.sequences_of(rank) for rank in (0, 1)] == [range(6), range(6, 8)]


def test_checkpoints_of_older_configurations_are_refused(
    tiny_config: Callable[..., Fields], refused: Callable[..., str]
) -> None:
    line = refused(tiny_config() | {"checkpoints": {"total_steps": 4}})
    assert "checkpoints: the reference step saves none any more; remove the key" in line
