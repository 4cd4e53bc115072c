import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from profilers.errors import ProfileUnwritableError, RecordingUnreadableError
from profilers.routing.recording import Recording
from profilers.routing.store import (
    read_header,
    read_recording,
    write_recording,
)
from tests.rows import each_row

Refusal = Callable[[Path], str]


def same(one: Recording, other: Recording) -> bool:
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name))
        and np.asarray(getattr(one, field.name)).dtype
        == np.asarray(getattr(other, field.name)).dtype
        for field in fields(Recording)
    )


def written(path: Path, recording: Recording) -> None:
    write_recording(path, recording, origin="a test", created="2026-01-02T03:04:05Z")


@pytest.fixture
def stored(tmp_path: Path, recording: Recording) -> Path:
    path = tmp_path / "recording"
    written(path, recording)
    return path


def edit_header(path: Path, change: dict[str, Any]) -> None:
    file = path / "recording.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def test_what_was_written_is_read_back_in_full(stored: Path, recording: Recording) -> None:
    assert same(read_recording(stored), recording)
    header = read_header(stored)
    assert (header.origin, header.created) == ("a test", "2026-01-02T03:04:05Z")
    assert header.passes == 3


def test_counts_without_tokens_make_one_table(tmp_path: Path) -> None:
    counts = np.ones((1, 1, 4), dtype=np.int64)
    bare = Recording(model="", workload="", layer_ids=(7,), top_k=None, count_PLE=counts)
    write_recording(tmp_path / "r", bare)
    assert {each.name for each in (tmp_path / "r").iterdir()} == {
        "recording.json",
        "counts.parquet",
    }
    assert same(read_recording(tmp_path / "r"), bare)


def test_a_newer_recording_replaces_the_older_whole(stored: Path, recording: Recording) -> None:
    bare = Recording(
        model="other",
        workload="",
        layer_ids=recording.layer_ids,
        top_k=None,
        count_PLE=recording.count_PLE[:1].copy(),
    )
    write_recording(stored, bare)
    assert same(read_recording(stored), bare)
    assert not (stored / "tokens.parquet").exists()
    assert [each.name for each in stored.parent.iterdir()] == ["recording"]


def test_a_folder_of_other_things_is_not_overwritten(tmp_path: Path, recording: Recording) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ProfileUnwritableError, match="no recording"):
        write_recording(tmp_path, recording)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_failure_half_way_leaves_the_older_one(
    stored: Path, recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("profilers.routing.tables.write_array", full)
    with pytest.raises(ProfileUnwritableError, match="No space left"):
        write_recording(stored, recording)
    assert same(read_recording(stored), recording)
    assert [each.name for each in stored.parent.iterdir()] == ["recording"]


@each_row(
    ("change", "reason"),
    [
        ({"schema_version": 2}, "schema_version: Input should be 1"),
        ({"passes": 4}, "6 rows, recording.json says 8"),
        ({"num_experts": 5}, "'values' is fixed_size_list"),
        ({"layer_ids": [3]}, "6 rows, recording.json says 3"),
        ({"layer_ids": [4, 3]}, "ascending"),
        ({"sampled_tokens": 6}, "tokens.parquet"),
        ({"top_k": None}, "tokens.parquet"),
        ({"passes": 2**26}, "at most"),
        ({"surplus": 1}, "surplus"),
    ],
)
def test_a_header_that_disagrees_is_refused(
    stored: Path, recording: Recording, refusal: Refusal, change: dict[str, Any], reason: str
) -> None:
    written(stored, recording)
    edit_header(stored, change)
    assert reason in refusal(stored)


def test_damaged_tables_are_refused(stored: Path, refusal: Refusal) -> None:
    file = stored / "counts.parquet"
    whole, content = pq.read_table(file), file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    assert "counts.parquet" in refusal(stored)
    pq.write_table(whole.take([1, 0, 2, 3, 4, 5]), file)
    assert "in order" in refusal(stored)
    negative = pa.FixedSizeListArray.from_arrays(pa.array([-1] * 24), 4)
    pq.write_table(whole.set_column(2, "values", negative), file)
    assert "[0][0][0] is -1" in refusal(stored)
    holes = pa.FixedSizeListArray.from_arrays(pa.array([None] + [1] * 23, type=pa.int64()), 4)
    pq.write_table(whole.set_column(2, "values", holes), file)
    assert "missing" in refusal(stored)
    file.unlink()
    assert "No such file" in refusal(stored)


def test_a_layer_without_tokens_is_refused(stored: Path, refusal: Refusal) -> None:
    file = stored / "counts.parquet"
    empty = pa.FixedSizeListArray.from_arrays(pa.array(([1] * 4 + [0] * 4) * 3), 4)
    pq.write_table(pq.read_table(file).set_column(2, "values", empty), file)
    assert "layer 4 has no tokens" in refusal(stored)


def test_a_header_that_is_no_json_is_refused(stored: Path, refusal: Refusal) -> None:
    (stored / "recording.json").write_text("{")
    assert "recording.json" in refusal(stored)
    (stored / "recording.json").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(RecordingUnreadableError, match="bytes"):
        read_recording(stored)
