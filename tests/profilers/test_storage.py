import errno
import os
from pathlib import Path

import pytest

from profilers.benchmark import Setting
from profilers.records import Case, Measurement, MeasurementStatus
from profilers.storage import SIZES, StorageBenchmark
from profilers.team import SingleRank
from tests.profilers.testing import UnmappedClock
from tests.rows import each_row


def benchmark(directory: Path) -> StorageBenchmark:
    return StorageBenchmark(
        setting=Setting(
            device="cpu", dtypes=(), team=SingleRank(), clock=UnmappedClock(), directory=directory
        )
    )


def measured(directory: Path, *, kind: str, size: int = 100_000) -> Measurement:
    case = Case(operation="storage", kind=kind, axes={"bytes": size})
    (row,) = benchmark(directory).measure(case, budget_s=0.0)
    return row


@each_row("kind", ["write", "read"])
def test_a_directory_is_measured_and_left_clean(tmp_path: Path, kind: str) -> None:
    row = measured(tmp_path, kind=kind)
    assert row.status is MeasurementStatus.OK
    assert min(row.times_s) > 0.0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_recorded_and_not_filled(tmp_path: Path) -> None:
    row = measured(tmp_path, kind="write", size=2**60)
    assert row.status is MeasurementStatus.FAILED
    assert "do not fit" in row.error
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_recorded_and_left_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_handle: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    row = measured(tmp_path, kind="write")
    monkeypatch.undo()
    assert (row.status, row.error) == (MeasurementStatus.FAILED, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_recorded(tmp_path: Path) -> None:
    row = measured(tmp_path / "absent", kind="read")
    assert (row.status, row.error) == (MeasurementStatus.FAILED, "No such file or directory")


def test_a_kind_that_does_not_exist_is_recorded(tmp_path: Path) -> None:
    assert "'erase'" in measured(tmp_path, kind="erase").error


def test_every_size_is_written_and_read(tmp_path: Path) -> None:
    sizes_by_kind = {(case.kind, case.axes["bytes"]) for case in benchmark(tmp_path).cases()}
    assert sizes_by_kind == {(kind, size) for kind in ("write", "read") for size in SIZES}
