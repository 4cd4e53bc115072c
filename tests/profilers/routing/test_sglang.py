"""Dumps are written here by hand, as SGLang's recorder does."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from profilers.errors import RecordingUnreadableError
from profilers.routing.formats import read_as
from profilers.routing.store import read_recording
from tests.expect import present
from tests.rows import each_row

Refusal = Callable[[Path], str]

# Layer 0 is dense. Three logical experts on four slots; expert 0 twice in layer 1, 2 in layer 2.
SLOTS = torch.tensor([[0, 1, 2, 0], [0, 1, 2, 0], [2, 1, 0, 2]])


def saved(folder: Path, name: str, content: Any) -> Path:
    torch.save(content, folder / f"expert_distribution_recorder_{name}.pt")
    return folder / f"expert_distribution_recorder_{name}.pt"


def a_pass(number: int, rank: int, counts: list[list[int]], **more: Any) -> dict[str, Any]:
    return {
        "forward_pass_id": number,
        "rank": rank,
        "gatherer_key": "primary",
        "global_physical_count": torch.tensor([[0, 0, 0, 0], *counts], dtype=torch.int32),
        **more,
    }


def test_stat_is_a_pass_a_step_without_dense_layers_and_empty_steps(tmp_path: Path) -> None:
    counts = torch.tensor(
        [[[0, 0], [3, 1], [2, 2]], [[0, 0], [0, 0], [0, 0]], [[0, 0], [1, 3], [4, 0]]]
    )
    content = {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}
    found = read_recording(saved(tmp_path, "17", content))
    assert found.layer_ids == (1, 2)
    assert found.num_decoder_layers == 3
    assert found.count_PLE.tolist() == [[[3, 1], [2, 2]], [[1, 3], [4, 0]]]
    assert found.top_k is None


@each_row("steps", [False, True])
def test_the_json_that_the_server_takes_is_read(tmp_path: Path, steps: bool) -> None:
    counts = [[0, 0], [3, 1]]
    file = tmp_path / "load.json"
    file.write_text(json.dumps({"logical_count": [counts] if steps else counts}))
    found = read_recording(file)
    assert (found.layer_ids, found.count_PLE.tolist()) == ((1,), [[[3, 1]]])


def test_ranks_are_summed_by_pass_and_slots_by_expert(tmp_path: Path) -> None:
    first = [a_pass(5, 0, [[1, 2, 3, 4], [1, 2, 3, 4]]), a_pass(6, 0, [[1, 0, 0, 0], [0, 0, 1, 0]])]
    for rank, records in enumerate((first, [a_pass(5, 1, [[10, 0, 0, 0], [0, 10, 0, 0]])])):
        content = {"records": records, "last_physical_to_logical_map": SLOTS}
        saved(tmp_path, f"17.5_{rank}", content)
    found = read_recording(tmp_path)
    # Layer 1, pass 5: expert 0 has slots 0 and 3 of rank 0, 1 + 4, and 10 of rank 1.
    assert found.layer_ids == (1, 2)
    assert found.count_PLE.tolist() == [
        [[15, 2, 3], [3, 12, 5]],
        [[1, 0, 0], [1, 0, 0]],
    ]


def test_tokens_give_transitions_and_samples(tmp_path: Path) -> None:
    # Two tokens of two choices in eight columns; slots of layer 1: 3, 1 and 2, 0.
    # Those are the experts 0, 1 and 2, 0; in layer 2 the slots 0, 1 and 3, 2 are 2, 1 and 2, 0.
    chosen = torch.full((3, 2, 8), -1, dtype=torch.int32)
    chosen[1, :, :2] = torch.tensor([[3, 1], [2, 0]])
    chosen[2, :, :2] = torch.tensor([[0, 1], [3, 2]])
    record = a_pass(1, 0, [[1, 1, 1, 1], [1, 1, 1, 1]], topk_ids_of_layer=chosen)
    # A rank that was idle in a pass records no token of it.
    idle = a_pass(2, 0, [[0] * 4] * 2, topk_ids_of_layer=chosen[:, :0])
    content = {"records": [record, idle], "last_physical_to_logical_map": SLOTS}
    found = read_recording(saved(tmp_path, "17_0", content))
    assert found.top_k == 2
    assert present(found.token_LTK).tolist() == [[[0, 1], [2, 0]], [[2, 1], [2, 0]]]
    # Token 0: {0, 1} to {2, 1}; token 1: {2, 0} to {2, 0}.
    assert present(found.transition_MEE)[0].tolist() == [[1, 1, 2], [0, 1, 1], [1, 0, 1]]
    assert found.count_PLE.tolist() == [[[2, 1, 1], [1, 1, 2]], [[0, 0, 0], [0, 0, 0]]]


def test_layers_may_be_named(tmp_path: Path) -> None:
    file = saved(tmp_path, "1", {"logical_count": torch.tensor([[0, 0], [3, 1], [1, 1]])})
    named = read_as("sglang", file, layer_ids=(7, 9))
    # Layers that the user names may be of a model of any size.
    assert (named.layer_ids, named.num_decoder_layers) == ((7, 9), None)
    with pytest.raises(RecordingUnreadableError, match="2 layers with tokens need as many"):
        read_as("sglang", file, layer_ids=(3, 7, 9))


class _Evil:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@each_row("writer", ["torch", "old torch", "plain pickle"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    tmp_path: Path, refusal: Refusal, writer: str
) -> None:
    mark, file = tmp_path / "it_ran", tmp_path / "expert_distribution_recorder_1.pt"
    content = {"logical_count": _Evil(mark)}
    if writer == "plain pickle":
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=writer == "torch")
    assert "refused: a pickle" in refusal(file)
    # The same where the folder is named rather than the file.
    assert "refused: a pickle" in refusal(tmp_path)
    assert not mark.exists()


def test_damaged_files_are_one_line(tmp_path: Path, refusal: Refusal) -> None:
    file = saved(tmp_path, "1", {"logical_count": torch.ones(2, 3)})
    whole = file.read_bytes()
    for length in (5, 100, len(whole) // 2, len(whole) - 30):
        file.write_bytes(whole[:length])
        assert refusal(file)
    file.write_bytes(b"")
    assert "known" in refusal(file)


def test_an_archive_that_unpacks_to_more_than_fits_is_refused(
    tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profilers.routing.contents.MOST_TENSOR_BYTES", 10_000)
    file = tmp_path / "a.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"0" * 20_000)
    assert "unpacks to 20000 bytes" in refusal(file)


@each_row(
    ("content", "reason"),
    [
        ({"logical_count": torch.zeros(2, 3)}, "no token was recorded"),
        ({"logical_count": torch.tensor([[1.0, float("nan")]])}, "[0][1] is nan"),
        ({"logical_count": torch.tensor([[1, -2]])}, "[0][1] is -2"),
        ({"logical_count": torch.ones(3)}, "must be [layers][experts]"),
        ({"logical_count": [[1, 2], [3]]}, "differ in length"),
        ({"records": [], "last_physical_to_logical_map": SLOTS}, "no forward pass"),
        (
            {"records": [1], "last_physical_to_logical_map": SLOTS},
            "records.0: Input should be a valid dictionary",
        ),
        ({"records": []}, "last_physical_to_logical_map"),
        (
            {"records": [a_pass(1, 0, [[1, 2, 3, 4]])], "last_physical_to_logical_map": SLOTS},
            "global_physical_count is [2, 4]",
        ),
        (
            {
                "records": [a_pass(-1, 0, [[1] * 4] * 2)],
                "last_physical_to_logical_map": SLOTS,
            },
            "forward_pass_id: Input should be greater",
        ),
        (
            {
                "records": [
                    a_pass(1, 0, [[1] * 4] * 2, topk_ids_of_layer=torch.full((3, 1, 8), 4))
                ],
                "last_physical_to_logical_map": SLOTS,
            },
            "topk_ids_of_layer[0][0][0] is 4; it must be a whole number from -1 to 3",
        ),
    ],
)
def test_each_wrong_field_is_one_line(
    tmp_path: Path, refusal: Refusal, content: Any, reason: str
) -> None:
    assert reason in refusal(saved(tmp_path, "1", content))


def test_dumps_of_different_kinds_are_not_mixed(tmp_path: Path, refusal: Refusal) -> None:
    saved(tmp_path, "1", {"logical_count": torch.ones(2, 3)})
    saved(tmp_path, "2_0", {"records": [], "last_physical_to_logical_map": SLOTS})
    assert "side by side" in refusal(tmp_path)


def test_dumps_of_different_models_are_not_mixed(tmp_path: Path, refusal: Refusal) -> None:
    saved(tmp_path, "1", {"logical_count": torch.ones(2, 3)})
    saved(tmp_path, "2", {"logical_count": torch.ones(2, 4)})
    assert "dumps of different models" in refusal(tmp_path)
    for rank, slots in enumerate((SLOTS, SLOTS + 1)):
        content = {
            "records": [a_pass(1, rank, [[1] * 4] * 2)],
            "last_physical_to_logical_map": slots,
        }
        saved(tmp_path, f"{rank + 1}", content)
    assert "dumps of different models" in refusal(tmp_path)


def test_a_placement_is_no_recording(tmp_path: Path, refusal: Refusal) -> None:
    file = tmp_path / "placement.json"
    file.write_text(json.dumps({"physical_to_logical_map": [[0, 1]]}))
    assert "is a placement" in refusal(file)


def test_counts_are_exact_in_whole_numbers(tmp_path: Path) -> None:
    large = 2**40 + 1
    file = saved(tmp_path, "1", {"logical_count": torch.tensor([[large, 1]])})
    assert int(read_recording(file).count_PLE.max()) == large
    assert read_recording(file).count_PLE.dtype == np.int64
