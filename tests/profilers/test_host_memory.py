"""Host memory: what is recorded of new pages and files in memory, and what is refused."""

from pathlib import Path

import pytest

from profilers import host_memory
from profilers.benchmark import Setting
from profilers.clock import HostClock
from profilers.devices import count_accelerators
from profilers.host_memory import KINDS, MEMORY, SIZES, HostMemoryBenchmark
from profilers.records import Case, Measurement, MeasurementStatus
from profilers.team import SingleRank


def benchmark(directory: Path, *, device: str = "cpu") -> HostMemoryBenchmark:
    return HostMemoryBenchmark(
        setting=Setting(
            device=device, dtypes=(), team=SingleRank(), clock=HostClock(), directory=directory
        )
    )


def measured(directory: Path, *, kind: str, size: int, device: str = "cpu") -> Measurement:
    case = Case(operation="host_memory", kind=kind, axes={"bytes": size})
    (row,) = benchmark(directory, device=device).measure(case, budget_s=0.0)
    return row


def check_rates(directory: Path, *, device: str) -> None:
    for kind in KINDS:
        small, large = (
            measured(directory, kind=kind, size=size, device=device) for size in SIZES[:2]
        )
        assert small.status is large.status is MeasurementStatus.OK, kind
        # The quickest of each: beside other work a median says more of that than of the bytes.
        assert 0.0 < min(small.times_s) < min(large.times_s), kind
        # Between 50 MB/s and 500 GB/s.
        assert 5e7 < SIZES[1] / large.median_s < 5e11, kind


@pytest.mark.skipif(not MEMORY.is_dir(), reason="no files in memory here")
def test_new_pages_and_files_in_memory_are_timed(tmp_path: Path) -> None:
    before = set(MEMORY.iterdir())
    check_rates(tmp_path, device="cpu")
    assert set(MEMORY.iterdir()) <= before
    sizes_by_kind = {(case.kind, case.axes["bytes"]) for case in benchmark(tmp_path).cases()}
    assert sizes_by_kind == {(kind, size) for kind in KINDS for size in SIZES}


@pytest.mark.gpu
@pytest.mark.skipif(not count_accelerators(), reason="no accelerator on this machine")
def test_new_pages_and_files_in_memory_are_timed_beside_an_accelerator(tmp_path: Path) -> None:
    check_rates(tmp_path, device="cuda:0")


def test_what_host_memory_refuses_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "MEMORY", tmp_path)
    assert "do not fit" in measured(tmp_path, kind="save", size=2**60).error
    assert "'erase'" in measured(tmp_path, kind="erase", size=2**20).error
    monkeypatch.setattr(host_memory, "MEMORY", tmp_path / "absent")
    assert measured(tmp_path, kind="load", size=2**20).status is MeasurementStatus.FAILED
