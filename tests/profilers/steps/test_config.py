"""Micro-batches that differ between data ranks, and what a configuration writes and refuses."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from profilers.errors import RankError
from profilers.steps.config import Dispatcher, Parallelism, StepConfig
from profilers.steps.layout import groups_of, join, node_groups_of
from tests.rows import each_row

Fields = dict[str, Any]


@each_row(
    ("changed", "said"),
    [
        ({"data": 3, "microbatches": [2, 1]}, "a count for each of 3 data ranks"),
        ({"data": 3, "microbatches": [2, 2, 1]}, "with 4 (global_batch_size / micro_batch_size)"),
        ({"data": 2, "microbatches": [4, 0]}, "greater than or equal to 1"),
        ({"data": 2, "pipeline": 2, "expert": 2, "microbatches": [3, 1]}, "not [3, 1]"),
        (
            {"data": 2, "pipeline": 2, "virtual": 2, "microbatches": [6, 2], "micro_batch_size": 1},
            "virtual_pipeline 1",
        ),
    ],
)
def test_microbatches_that_cannot_be_run_are_refused(
    tiny_config: Callable[..., Fields], changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError) as error:
        StepConfig.model_validate(tiny_config(**changed))
    assert said in str(error.value), f"{said!r} expected, not {error.value}"


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


# Which ranks work together.


def test_groups_of_a_folded_layout() -> None:
    # 2 stages of 2 data x 2 tensor ranks; all 4 ranks of a stage share the experts.
    groups = groups_of(Parallelism(tensor=2, data=2, pipeline=2, expert=4))
    assert groups["tensor"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups["data"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups["pipeline"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert groups["expert"] == groups["stage"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups["replica"] == groups["solo"]


DEGREE = st.sampled_from([1, 2, 3, 4])


@settings(deadline=None, max_examples=60)
@given(tensor=DEGREE, data=DEGREE, pipeline=DEGREE, expert=st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
def test_every_kind_of_group_covers_every_rank_once(
    tensor: int, data: int, pipeline: int, expert: int
) -> None:
    if (tensor * data) % expert:
        with pytest.raises(ValueError, match="does not divide"):
            Parallelism(tensor=tensor, data=data, pipeline=pipeline, expert=expert)
        return
    degrees = Parallelism(tensor=tensor, data=data, pipeline=pipeline, expert=expert)
    sizes = {
        "solo": 1,
        "tensor": tensor,
        "pipeline": pipeline,
        "stage": tensor * data,
        "data": data,
        "expert": expert,
        "replica": tensor * data // expert,
    }
    for kind, ranks in groups_of(degrees).items():
        assert sorted(rank for group in ranks for rank in group) == list(range(degrees.world))
        assert {len(group) for group in ranks} == {sizes[kind]}


def test_expert_groups_that_cross_nodes_are_cut_across_and_inside() -> None:
    # 2 expert groups of 4 ranks on nodes of 2.
    degrees = Parallelism(data=8, expert=4, dispatcher=Dispatcher.HIERARCHICAL)
    assert node_groups_of(degrees, ranks_per_node=2) == {
        "across": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "inside": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }
    # 4 ranks on a node, or flat dispatch: nothing to cross.
    assert node_groups_of(degrees, ranks_per_node=4) == {}
    assert node_groups_of(Parallelism(data=8, expert=4), ranks_per_node=2) == {}


def test_nodes_that_torchrun_made_too_uneven_are_refused_before_any_group_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    degrees = Parallelism(data=6, expert=2, dispatcher=Dispatcher.HIERARCHICAL)
    with pytest.raises(RankError, match="3 ranks on a node neither divide the 2 expert ranks"):
        join(degrees, device=torch.device("cpu"), timeout=timedelta(seconds=1))
