"""Stored tables read as columns say what their records say."""

from pathlib import Path

import numpy as np
import pytest

from profilers.arrays import Arrays, read_profile_arrays
from profilers.errors import ProfileUnreadableError
from profilers.records import (
    Case,
    Machine,
    Measurement,
    MeasurementStatus,
    Profile,
    ProfileHeader,
    Source,
    TableInfo,
)
from profilers.store import write_profile


def gemm(m: int, *times_s: float, status: MeasurementStatus = MeasurementStatus.OK) -> Measurement:
    case = Case(
        operation="gemm", dtype="bf16", direction="forward", axes={"m": m, "n": 64, "k": 32}
    )
    return Measurement(case=case, status=status, source=Source.IMPORTED, times_s=times_s)


def stored(folder: Path, rows: tuple[Measurement, ...]) -> Path:
    machine = Machine(
        hostname="h",
        device="NVIDIA H200",
        device_kind="cuda",
        num_devices=8,
        memory_bytes_per_device=1,
        cores=0,
        host_memory_bytes=0,
        world=8,
        threads_per_rank=0,
        oversubscribed=False,
        libraries={"vllm": "0.24.0", "nccl": "2.29.2"},
    )
    header = ProfileHeader(
        moetune_version="0",
        created="2026-01-01T00:00:00Z",
        machine=machine,
        tables={"gemm": TableInfo(rows=len(rows), complete=True, seconds=0.0)},
    )
    write_profile(folder, Profile(header=header, measurements=rows))
    return folder


def test_medians_and_labels_come_back(tmp_path: Path) -> None:
    rows = (
        gemm(4, 3e-6, 1e-6, 2e-6),
        gemm(8, 4e-6, 6e-6),
        gemm(16, status=MeasurementStatus.FAILED),
    )
    (table,) = read_profile_arrays(stored(tmp_path / "p", rows), operations=("gemm", "moe"))
    assert table.software == "vllm"
    assert table.version == "0.24.0"
    assert table.source is Source.IMPORTED
    assert table.axes_N["m"].tolist() == [4, 8]
    assert table.time_s_N == pytest.approx([2e-6, 5e-6])
    assert [row.median_s for row in rows[:2]] == pytest.approx(table.time_s_N)


def test_a_damaged_table_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = stored(tmp_path / "p", (gemm(4, 1e-6),))
    (folder / "gemm.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ProfileUnreadableError, match="measure it again"):
        read_profile_arrays(folder, operations=("gemm",))


def test_columns_of_unlike_lengths_cannot_be() -> None:
    with pytest.raises(ValueError, match="unlike lengths"):
        Arrays(
            operation="gemm",
            software="",
            version="",
            source=Source.MEASURED,
            kind_N=np.array([""], dtype=object),
            dtype_N=np.array(["bf16"], dtype=object),
            axes_N={axis: np.array([1, 2]) for axis in ("m", "n", "k")},
            time_s_N=np.array([1e-6, 1e-6]),
        )
