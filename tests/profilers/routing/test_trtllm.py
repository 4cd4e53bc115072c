"""Directories are written with the safetensors package, which the reader does without."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profilers.routing.store import read_recording
from tests.rows import each_row

safetensors = pytest.importorskip("safetensors.numpy")

Refusal = Callable[[Path], str]


@pytest.fixture
def statistics(tmp_path: Path) -> Path:
    """Two ranks, two iterations, the layers 3 and 4, three experts."""
    folder = tmp_path / "expert_statistic"
    folder.mkdir()
    meta = {"num_experts": 3, "num_experts_per_token": 2}
    (folder / "meta_info.json").write_text(json.dumps(meta))
    for rank in (0, 1):
        tensors = {
            f"{iteration}_{layer}": np.array([iteration, layer, 10 * rank], dtype=np.int64)
            for iteration in (100, 101)
            for layer in (3, 4)
        }
        safetensors.save_file(tensors, folder / f"rank{rank}.safetensors", metadata={"by": "test"})
    return folder


def test_iterations_are_passes_and_ranks_are_summed(statistics: Path) -> None:
    found = read_recording(statistics)
    assert (found.layer_ids, found.top_k) == ((3, 4), 2)
    assert found.count_PLE.tolist() == [
        [[200, 6, 10], [200, 8, 10]],
        [[202, 6, 10], [202, 8, 10]],
    ]
    assert found.transition_MEE is None


def _rewritten(file: Path, header: Any, content: bytes = b"") -> None:
    table = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(table)) + table + content)


ENTRY = {"dtype": "I64", "shape": [3], "data_offsets": [0, 24]}


@each_row(
    ("header", "reason"),
    [
        ({"100_3": ENTRY}, "does not lie in the file"),
        ({"100_3": ENTRY | {"data_offsets": [0, 16]}}, "does not lie in the file"),
        ({"100_3": ENTRY | {"shape": [2**62]}}, "does not lie in the file"),
        ({"100_3": ENTRY | {"shape": [-3]}}, "100_3.shape.0: Input should be greater"),
        (
            {"100_3": ENTRY | {"dtype": "BF16"}},
            "rank0.safetensors: 100_3.dtype: Input should be 'I64'",
        ),
        ({"100_3": {"dtype": "I64"}}, "100_3.shape: Field required"),
        ({"100_3": [1]}, "100_3: Input should be an object"),
        ({"layer3": ENTRY}, "is not <iteration>_<layer>"),
        ([], "Input should be an object"),
        ({}, "holds no token"),
    ],
)
def test_each_wrong_table_is_one_line(
    statistics: Path, refusal: Refusal, header: Any, reason: str
) -> None:
    for file in statistics.glob("rank*"):
        file.unlink()
    _rewritten(statistics / "rank0.safetensors", header)
    assert reason in refusal(statistics)


def test_wrong_sizes_negative_counts_and_damage_are_one_line(
    statistics: Path, refusal: Refusal
) -> None:
    file = statistics / "rank1.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-8])
    assert "cut short" in refusal(statistics)
    file.write_bytes(whole[:4])
    assert "cut short" in refusal(statistics)
    file.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    assert "no safetensors file" in refusal(statistics)
    safetensors.save_file({"1_3": np.array([1, 2, 3, 4])}, file)
    assert "has 4 experts, meta_info.json says 3" in refusal(statistics)
    safetensors.save_file({"1_3": np.array([1, -2, 3])}, file)
    assert "is -2" in refusal(statistics)
    (statistics / "meta_info.json").write_text('{"num_experts": 3}')
    assert "num_experts_per_token" in refusal(statistics)
    for each in statistics.glob("rank*"):
        each.unlink()
    (statistics / "meta_info.json").write_text('{"num_experts": 3, "num_experts_per_token": 2}')
    assert "name the directory of all ranks" in refusal(statistics)
