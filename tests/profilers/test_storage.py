"""The suite of storage: files, the host's own memory, and loads of a distributed checkpoint."""

import errno
import os
import resource
import signal
from pathlib import Path

import pytest

from profilers import checkpoint_load, host_memory, storage
from profilers.benchmark import Benchmark, Setting
from profilers.checkpoint_load import TENSOR_BYTES, benchmarks
from profilers.clock import HostClock
from profilers.devices import count_accelerators
from profilers.host_memory import KINDS, MEMORY
from profilers.records import Case, Measurement, MeasurementStatus
from profilers.team import SingleRank
from tests.profilers.testing import UnmappedClock
from tests.rows import each_row


def suite(directory: Path, *, device: str = "cpu") -> dict[str, Benchmark]:
    """Return the benchmarks by their tables."""
    setting = Setting(
        device=device, dtypes=(), team=SingleRank(), clock=HostClock(), directory=directory
    )
    return {one.operation: one for one in benchmarks(setting)}


def measured(
    operation: str, directory: Path, *, kind: str = "", size: int, device: str = "cpu"
) -> Measurement:
    case = Case(operation=operation, kind=kind, axes={"bytes": size})
    (row,) = suite(directory, device=device)[operation].measure(case, budget_s=0.0)
    return row


def written(directory: Path, *, kind: str = "write", size: int = 100_000) -> Measurement:
    """Measure files with a clock on which every repeat counts."""
    setting = Setting(
        device="cpu", dtypes=(), team=SingleRank(), clock=UnmappedClock(), directory=directory
    )
    case = Case(operation="storage", kind=kind, axes={"bytes": size})
    (row,) = storage.StorageBenchmark(setting=setting).measure(case, budget_s=0.0)
    return row


def loaded(directory: Path, *, size: int) -> Measurement:
    return measured("checkpoint_load", directory, kind="distributed", size=size)


@each_row("kind", ["write", "read"])
def test_a_directory_is_measured_and_left_clean(tmp_path: Path, kind: str) -> None:
    row = written(tmp_path, kind=kind)
    assert row.status is MeasurementStatus.OK
    assert min(row.times_s) > 0.0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_recorded_and_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "MEMORY", tmp_path)
    for operation, kind in (
        ("storage", "write"),
        ("host_memory", "save"),
        ("checkpoint_load", "distributed"),
    ):
        row = measured(operation, tmp_path, kind=kind, size=2**60)
        assert (row.status, "do not fit" in row.error) == (MeasurementStatus.FAILED, True)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_recorded_and_left_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_handle: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    row = written(tmp_path)
    monkeypatch.undo()
    assert (row.status, row.error) == (MeasurementStatus.FAILED, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_and_an_unknown_kind_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = written(tmp_path / "absent", kind="read")
    assert (row.status, row.error) == (MeasurementStatus.FAILED, "No such file or directory")
    assert "'erase'" in written(tmp_path, kind="erase").error
    monkeypatch.setattr(host_memory, "MEMORY", tmp_path)
    assert "'erase'" in measured("host_memory", tmp_path, kind="erase", size=2**20).error
    monkeypatch.setattr(host_memory, "MEMORY", tmp_path / "absent")
    row = measured("host_memory", tmp_path, kind="load", size=2**20)
    assert row.status is MeasurementStatus.FAILED


def test_the_suite_has_its_tables_with_every_kind_and_size(tmp_path: Path) -> None:
    found = suite(tmp_path)
    assert list(found) == ["storage", "host_memory", "checkpoint_load"]
    for operation, kinds, sizes in (
        ("storage", ("write", "read"), storage.SIZES),
        ("host_memory", KINDS, host_memory.SIZES),
    ):
        cases = {(case.kind, case.axes["bytes"]) for case in found[operation].cases()}
        assert cases == {(kind, size) for kind in kinds for size in sizes}


def check_rates(directory: Path, *, device: str) -> None:
    sizes = host_memory.SIZES[:2]
    for kind in KINDS:
        small, large = (
            measured("host_memory", directory, kind=kind, size=size, device=device)
            for size in sizes
        )
        assert small.status is large.status is MeasurementStatus.OK, kind
        # The quickest of each: beside other work a median says more of that than of the bytes.
        assert 0.0 < min(small.times_s) < min(large.times_s), kind
        # Between 50 MB/s and 500 GB/s.
        assert 5e7 < sizes[1] / large.median_s < 5e11, kind


@pytest.mark.skipif(not MEMORY.is_dir(), reason="no files in memory here")
def test_new_pages_and_files_in_memory_are_timed(tmp_path: Path) -> None:
    before = set(MEMORY.iterdir())
    check_rates(tmp_path, device="cpu")
    assert set(MEMORY.iterdir()) <= before


@pytest.mark.gpu
@pytest.mark.skipif(not count_accelerators(), reason="no accelerator on this machine")
def test_new_pages_and_files_in_memory_are_timed_beside_an_accelerator(tmp_path: Path) -> None:
    check_rates(tmp_path, device="cuda:0")


def test_loads_of_a_checkpoint_are_timed_and_leave_nothing_behind(tmp_path: Path) -> None:
    small, large = (loaded(tmp_path, size=size) for size in checkpoint_load.SIZES[:2])
    for row in (small, large):
        assert row.status is MeasurementStatus.OK, row.error
        assert len(row.times_s) == checkpoint_load.REPEATS
    # Between 5 MB/s and 500 GB/s.
    assert 5e6 < checkpoint_load.SIZES[1] / large.median_s < 5e11
    assert not list(tmp_path.iterdir())
    assert all(size % TENSOR_BYTES == 0 for size in checkpoint_load.SIZES)


def test_a_disk_that_refuses_a_save_is_recorded(tmp_path: Path) -> None:
    # A quota, or others' files, may end a save for which there was room.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (TENSOR_BYTES // 2, limits[1]))
        row = loaded(tmp_path, size=checkpoint_load.SIZES[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (row.status, row.error) == (MeasurementStatus.FAILED, os.strerror(errno.EFBIG))
    assert not list(tmp_path.iterdir())
