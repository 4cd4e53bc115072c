"""Bare arrays of numpy and torch, CSV, and vLLM-Ascend's load with its map."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from profilers.errors import RecordingUnreadableError, UnknownNameError
from profilers.routing.formats import read_as
from profilers.routing.store import read_recording
from tests.rows import each_row

Refusal = Callable[[Path], str]

COUNTS = np.array([[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [1, 1, 1]]])


@each_row("suffix", [".npy", ".pt"])
@each_row("passes", [False, True])
def test_an_array_is_counts_by_layer_or_by_pass(tmp_path: Path, suffix: str, passes: bool) -> None:
    array = COUNTS if passes else COUNTS[0]
    # The name says nothing; the content does.
    file = tmp_path / "load"
    with file.open("wb") as stream:
        if suffix == ".npy":
            np.save(stream, array.astype(np.float32))
        else:
            torch.save(torch.from_numpy(array), stream)
    found = read_recording(file)
    assert found.count_PLE.tolist() == (COUNTS if passes else COUNTS[:1]).tolist()
    assert found.layer_ids == (0, 1)


def test_a_layer_that_nothing_was_counted_of_is_left_out(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[0, 0], [1, 2], [0, 0], [3, 0]]))
    assert read_recording(tmp_path / "a.npy").layer_ids == (1, 3)


@each_row(
    ("array", "reason"),
    [
        (np.array([1, 2]), "must be [layers][experts]"),
        (np.ones((1, 1, 1, 1)), "must be [layers][experts]"),
        (np.zeros((2, 0)), "has shape [2, 0]"),
        (np.zeros((2, 3)), "no token was recorded"),
        (np.array([[1.0, np.nan]]), "[0][1] is nan"),
        (np.array([[1.0, np.inf]]), "[0][1] is inf"),
        (np.array([[1, -1]]), "[0][1] is -1"),
        (np.array([[1.5, 1]]), "[0][0] is 1.5"),
        (np.array([["a", "b"]]), "counts are numbers"),
        (np.array([[True, False]]), "counts are numbers"),
    ],
)
def test_each_wrong_array_is_one_line(
    tmp_path: Path, refusal: Refusal, array: Any, reason: str
) -> None:
    np.save(tmp_path / "a.npy", array)
    assert reason in refusal(tmp_path / "a.npy")


def test_objects_damage_and_ambiguity_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    file = tmp_path / "a.npy"
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    assert "no array of plain numbers" in refusal(file)
    np.save(file, COUNTS)
    file.write_bytes(file.read_bytes()[:-8])
    assert refusal(file)
    torch.save({"one": torch.ones(2, 2), "two": torch.ones(2, 2)}, tmp_path / "b.pt")
    assert "or one tensor of counts" in refusal(tmp_path / "b.pt")
    torch.save([1, 2], tmp_path / "c.pt")
    assert "holds a list" in refusal(tmp_path / "c.pt")
    np.savez(tmp_path / "d.npz", load=np.ones((2, 2)))
    assert "save its array as .npy" in refusal(tmp_path / "d.npz")


def test_an_array_larger_than_what_is_read_is_refused(
    tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profilers.routing.contents.MOST_ARRAY_BYTES", 1000)
    np.save(tmp_path / "a.npy", np.ones((40, 40)))
    assert "larger than the 1000 bytes" in refusal(tmp_path / "a.npy")


def ascend_map() -> dict[str, Any]:
    """Two layers on two devices of two slots; three experts, 0 twice in the first layer."""
    slots = [[[0, 1], [2, 0]], [[2, 1], [1, 0]]]
    return {
        "moe_layer_count": 2,
        "layer_list": [
            {
                "layer_id": layer,
                "device_count": 2,
                "device_list": [
                    {"device_id": device, "device_expert": experts}
                    for device, experts in enumerate(devices)
                ],
            }
            for layer, devices in enumerate(slots)
        ],
    }


def test_ascend_loads_of_slots_become_loads_of_experts(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(json.dumps(ascend_map()))
    load = torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]]])
    torch.save(load, tmp_path / "moe_load.pt")
    wanted = [[1 + 4, 2, 3], [8, 6 + 7, 5]]
    assert read_recording(tmp_path).count_PLE.tolist() == [wanted]
    torch.save(load.reshape(2, 4), tmp_path / "moe_load.pt")
    assert read_recording(tmp_path).count_PLE.tolist() == [wanted]
    torch.save(torch.stack([load, load * 2]), tmp_path / "moe_load.pt")
    doubled = (2 * np.array(wanted)).tolist()
    assert read_recording(tmp_path).count_PLE.tolist() == [wanted, doubled]


def test_an_ascend_load_that_does_not_fit_its_map_is_refused(
    tmp_path: Path, refusal: Refusal
) -> None:
    (tmp_path / "map.json").write_text(json.dumps(ascend_map()))
    assert "1 .json and 0 of" in refusal(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.json").write_text("{}")
    assert "is no recording of routing that is known" in refusal(tmp_path / "other")
    # Eight numbers as the map has slots, yet devices and layers stand the other way round.
    np.save(tmp_path / "load.npy", np.ones((2, 1, 4, 1)))
    assert "must be [layers][devices][slots]" in refusal(tmp_path)
    np.save(tmp_path / "load.npy", np.ones((3, 4)))
    assert "has shape [3, 4]" in refusal(tmp_path)
    broken = ascend_map()
    del broken["layer_list"][1]["device_list"]
    (tmp_path / "map.json").write_text(json.dumps(broken))
    assert "lacks layer_list" in refusal(tmp_path)


def test_a_map_without_counts_is_a_placement(tmp_path: Path, refusal: Refusal) -> None:
    (tmp_path / "map.json").write_text(json.dumps(ascend_map()))
    assert "is a placement" in refusal(tmp_path / "map.json")


def test_the_tensor_of_ascends_script_is_logical(tmp_path: Path) -> None:
    torch.save(torch.from_numpy(COUNTS[0]), tmp_path / "a.pt")
    assert read_as("vllm-ascend", tmp_path / "a.pt", layer_ids=(3, 4)).layer_ids == (3, 4)


def test_unknown_names_and_impossible_facts_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", COUNTS)
    with pytest.raises(UnknownNameError, match="routing-json"):
        read_as("nope", tmp_path / "a.npy")
    with pytest.raises(RecordingUnreadableError, match="layer ids 1, 2, 3: 2 layers"):
        read_as("eplb", tmp_path / "a.npy", layer_ids=(1, 2, 3))
    with pytest.raises(RecordingUnreadableError, match="top_k 4 is more than the 3 experts"):
        read_as("eplb", tmp_path / "a.npy", top_k=4)
    with pytest.raises(RecordingUnreadableError, match="need as many ascending ids"):
        read_as("eplb", tmp_path / "a.npy", layer_ids=(2, 1))
