"""Loads that a goal names: read, placed, and refused in one line where files disagree."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.expect import present, refused
from tests.rows import each_row
from tests.tuner.engines.placement.testing import sample_decision, sample_placement
from tests.tuner.models import example_model
from tuner.errors import SpecError
from tuner.search.serve.recorded_loads import expert_loads, read_placement
from tuner.spec.goal import Routing
from tuner.spec.model import ModelSpec
from tuner.spec.serving.goal import ServeGoal

MODEL = example_model("tiny-moe")
"""Four layers of eight experts, two a token."""


def goal_of(routing: Path | None, placement: Path | None = None) -> ServeGoal:
    found = ServeGoal.model_validate(
        {
            "kind": "serve",
            "engine": {"name": "sglang"},
            "traffic": {"concurrency": 4, "input_tokens": 100, "output_tokens": 10},
        }
    )
    recorded = None if routing is None else Routing.model_construct(path=routing)
    return found.model_copy(update={"routing": recorded, "placement": placement})


def recording(folder: Path, **changes: Any) -> Path:
    values: dict[str, Any] = {
        "num_logical_experts": 8,
        "top_k": 2,
        "layer_ids": [1, 3],
        "logical_count": [[8, 1, 1, 1, 1, 1, 1, 2], [1, 1, 1, 1, 1, 1, 1, 1]],
    }
    path = folder / "routing.json"
    path.write_text(json.dumps(values | changes))
    return path


def placement(folder: Path, **changes: Any) -> Path:
    rows = [list(range(8)), [7, 6, 5, 4, 3, 2, 1, 0]]
    decision = sample_decision(
        **{"physical_to_logical": rows, "num_experts": 8, "layer_ids": (1, 3), **changes}
    )
    path = folder / "plan.json"
    path.write_text(sample_placement(decision).plan.model_dump_json())
    return path


def test_a_goal_that_names_nothing_has_no_loads() -> None:
    assert expert_loads(goal_of(None), MODEL) is None


def test_shares_are_those_that_were_recorded(tmp_path: Path) -> None:
    loads = present(expert_loads(goal_of(recording(tmp_path)), MODEL))
    assert loads.share_LE[0] == pytest.approx(np.array([8, 1, 1, 1, 1, 1, 1, 2]) / 16.0)
    assert (loads.top_k, loads.num_slots) == (2, 8)


@each_row("is_folder", [False, True])
def test_a_placement_holds_the_recorded_layers(tmp_path: Path, is_folder: bool) -> None:
    rows = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 7, 1, 6, 2, 5, 3, 4], [7, 6, 5, 4, 3, 2, 1, 0]]
    plan = placement(tmp_path, physical_to_logical=rows, layer_ids=(0, 1, 3))
    named = tmp_path if is_folder else plan
    loads = present(expert_loads(goal_of(recording(tmp_path), named), MODEL))
    assert present(loads.expert_LS).tolist() == rows[1:]
    assert loads.fits(4)
    # Expert 0 takes 8 of 16; beside 1 or beside 7 with 1 or 2 more, over 4.
    assert loads.expert_imbalance(4) == pytest.approx(np.mean([4 * 10 / 16, 1.0]))


@each_row(
    ("recorded", "placed", "message"),
    [
        (None, {}, r"goal\.placement: needs goal\.routing"),
        (
            {"num_logical_experts": 4, "logical_count": [[1] * 4, [1] * 4]},
            None,
            "has 8 experts a layer",
        ),
        ({"layer_ids": [3, 9]}, None, "layer 9 was"),
        ({"top_k": 4}, None, "4 experts a token were recorded, tiny-moe has 2"),
        ({}, {"layer_ids": (0, 1)}, "layer 3 was recorded and not placed"),
        (
            {},
            {
                "num_experts": 6,
                "physical_to_logical": [[0, 1, 2, 3, 4, 5, 0, 2], [5, 4, 3, 2, 1, 0, 4, 1]],
            },
            "6 experts were placed, 8 recorded",
        ),
    ],
)
def test_recordings_and_placements_of_another_model_are_refused(
    tmp_path: Path, recorded: dict[str, Any] | None, placed: dict[str, Any] | None, message: str
) -> None:
    loads = None if recorded is None else recording(tmp_path, **recorded)
    named = [] if placed is None else [placement(tmp_path, **placed)]
    with refused(SpecError, match=message):
        expert_loads(goal_of(loads, *named), MODEL)


@each_row("text", ["{}", "[]", "no", '{"goal": {"kind": "train"}}'])
def test_what_is_no_placement_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with refused(SpecError, match="name the plan of a goal of kind 'place'"):
        read_placement(path)


def test_a_dense_model_has_no_loads(tmp_path: Path) -> None:
    dense: ModelSpec = example_model("llama-3.1-8b")
    with pytest.raises(SpecError, match="has no experts"):
        expert_loads(goal_of(recording(tmp_path)), dense)
