"""Loads of a distributed checkpoint: what is timed, what is left behind, and what is refused."""

import errno
import os
import resource
import signal
from pathlib import Path

from profilers import checkpoint_load
from profilers.benchmark import Setting
from profilers.checkpoint_load import (
    SIZES,
    TENSOR_BYTES,
    CheckpointLoadBenchmark,
    benchmarks,
)
from profilers.clock import HostClock
from profilers.records import Case, Measurement, MeasurementStatus
from profilers.team import SingleRank


def setting(directory: Path) -> Setting:
    return Setting(
        device="cpu", dtypes=(), team=SingleRank(), clock=HostClock(), directory=directory
    )


def measured(directory: Path, *, size: int) -> Measurement:
    case = Case(operation="checkpoint_load", kind="distributed", axes={"bytes": size})
    (row,) = CheckpointLoadBenchmark(setting=setting(directory)).measure(case, budget_s=0.0)
    return row


def test_loads_are_timed_and_leave_nothing_behind(tmp_path: Path) -> None:
    small, large = (measured(tmp_path, size=size) for size in SIZES[:2])
    for row in (small, large):
        assert row.status is MeasurementStatus.OK, row.error
        assert len(row.times_s) == checkpoint_load.REPEATS
    # Between 5 MB/s and 500 GB/s.
    assert 5e6 < SIZES[1] / large.median_s < 5e11
    assert not list(tmp_path.iterdir())
    assert all(size % TENSOR_BYTES == 0 for size in SIZES)


def test_a_disk_without_room_is_recorded(tmp_path: Path) -> None:
    row = measured(tmp_path, size=2**60)
    assert (row.status, "do not fit" in row.error) == (MeasurementStatus.FAILED, True)


def test_a_disk_that_refuses_a_save_is_recorded(tmp_path: Path) -> None:
    # A quota, or others' files, may end a save for which there was room.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (TENSOR_BYTES // 2, limits[1]))
        row = measured(tmp_path, size=SIZES[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (row.status, row.error) == (MeasurementStatus.FAILED, os.strerror(errno.EFBIG))
    assert not list(tmp_path.iterdir())


def test_the_suite_of_storage_has_its_tables(tmp_path: Path) -> None:
    tables = [one.operation for one in benchmarks(setting(tmp_path))]
    assert tables == ["storage", "host_memory", "checkpoint_load"]
