"""Saves beside GEMMs: what is recorded, and that a failing disk ends neither rank nor thread."""

import errno
import os
from pathlib import Path

import pytest

from profilers.background_save import KINDS, SIZES, BackgroundSaveBenchmark
from profilers.benchmark import Setting
from profilers.clock import HostClock
from profilers.devices import count_accelerators
from profilers.records import Case, Measurement, MeasurementStatus
from profilers.team import SingleRank


def benchmark(directory: Path, *, device: str = "cpu") -> BackgroundSaveBenchmark:
    return BackgroundSaveBenchmark(
        setting=Setting(
            device=device, dtypes=(), team=SingleRank(), clock=HostClock(), directory=directory
        )
    )


def measured(directory: Path, *, kind: str, size: int, device: str = "cpu") -> Measurement:
    case = Case(operation="background_save", kind=kind, axes={"bytes": size})
    (row,) = benchmark(directory, device=device).measure(case, budget_s=0.0)
    return row


def check_saves(directory: Path, *, device: str) -> None:
    saves = [measured(directory, kind="save", size=size, device=device) for size in SIZES[:2]]
    delay = measured(directory, kind="delay", size=SIZES[1], device=device)
    assert all(row.status is MeasurementStatus.OK for row in (*saves, delay))
    assert min(saves[0].times_s) > 0.0
    assert min(saves[0].times_s) < min(saves[1].times_s)
    # The computation cannot lose much more than the time of a save.
    assert min(delay.times_s) >= 0.0
    assert delay.median_s < 3.0 * saves[1].median_s
    assert list(directory.iterdir()) == []


def test_a_save_and_its_delay_are_measured(tmp_path: Path) -> None:
    check_saves(tmp_path, device="cpu")
    sizes_by_kind = {(case.kind, case.axes["bytes"]) for case in benchmark(tmp_path).cases()}
    assert sizes_by_kind == {(kind, size) for kind in KINDS for size in SIZES}


@pytest.mark.gpu
@pytest.mark.skipif(not count_accelerators(), reason="no accelerator on this machine")
def test_a_save_and_its_delay_are_measured_on_an_accelerator(tmp_path: Path) -> None:
    check_saves(tmp_path, device="cuda:0")


def test_what_the_disk_refuses_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "do not fit" in measured(tmp_path, kind="save", size=2**60).error
    assert "'erase'" in measured(tmp_path, kind="erase", size=2**20).error

    def full(_handle: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    row = measured(tmp_path, kind="save", size=2**20)
    monkeypatch.undo()
    assert (row.status, row.error) == (MeasurementStatus.FAILED, "No space left on device")
    assert list(tmp_path.iterdir()) == []
