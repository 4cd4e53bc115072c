"""The table of conversions: its grid, its rows, and what becomes of cases that fail."""

from pathlib import Path

import numpy as np
import pytest

from profilers.benchmark import Setting
from profilers.devices import clock_of, count_accelerators, pick_device
from profilers.kernels.suite import LONG_REPEATS, measure_kernel
from profilers.kv_transfer.suite import DTYPES, KINDS, ConversionBenchmark, benchmarks, prepare
from profilers.records import Case, MeasurementStatus
from profilers.schedule import distinct
from profilers.team import SingleRank
from profilers.work import work
from tests.profilers.testing import UnmappedClock
from tests.rows import each_row


def benchmark() -> ConversionBenchmark:
    setting = Setting(
        device="cpu", dtypes=("fp32",), team=SingleRank(), clock=UnmappedClock(), directory=Path()
    )
    (found,) = benchmarks(setting)
    return found


def case(kind: str, dtype: str, **axes: int) -> Case:
    sizes = {"tokens": 40, "heads": 4, "width": 8, "page_from": 16, "page_to": 32}
    degrees = {"tensor_from": 1, "tensor_to": 1}
    return Case(
        operation="kv_conversion", kind=kind, dtype=dtype, axes={**sizes, **degrees, **axes}
    )


@each_row(("kind", "dtype"), KINDS)
def test_every_line_of_the_grid_is_measured_with_its_repeats(kind: str, dtype: str) -> None:
    heads = 1 if kind.startswith("latent") else 4
    requested = case(kind, dtype, heads=heads, tensor_from=2, tensor_to=4)
    (row,) = benchmark().measure(requested, budget_s=0.0)
    assert row.status is MeasurementStatus.OK, row.error
    assert len(row.times_s) >= LONG_REPEATS
    assert all(time_s > 0.0 for time_s in row.times_s)


@pytest.mark.gpu
@pytest.mark.skipif(not count_accelerators(), reason="no accelerator on this machine")
@each_row(("kind", "dtype"), KINDS)
def test_every_line_of_the_grid_runs_on_an_accelerator(kind: str, dtype: str) -> None:
    device = pick_device("cuda", local_rank=0)
    heads = 1 if kind.startswith("latent") else 4
    rows = measure_kernel(
        one := case(kind, dtype, heads=heads, tensor_from=2, tensor_to=4),
        prepare=lambda: prepare(one, device),
        clock=clock_of(device),
        budget_s=0.0,
        free_bytes=2**32,
        rank=0,
    )
    assert [row.status for row in rows] == [MeasurementStatus.OK], rows[0].error


def test_the_grid_is_distinct_and_can_be_refined_along_tokens() -> None:
    cases = benchmark().cases()
    assert len(distinct(cases)) == len(cases) < 120
    assert {one.dtype for one in cases} <= set(DTYPES)
    for kind, dtype in KINDS:
        line = {one.axes["tokens"] for one in cases if (one.kind, one.dtype) == (kind, dtype)}
        assert len(line) >= 3


def test_cases_that_cannot_be_are_recorded() -> None:
    (row,) = benchmark().measure(case("nhd_nhd/int3", "bf16"), budget_s=0.0)
    assert row.status is MeasurementStatus.FAILED
    assert "int3" in row.error
    (row,) = benchmark().measure(case("nhd_nhd", "bf16", tokens=2**45), budget_s=0.0)
    assert row.status is MeasurementStatus.OUT_OF_MEMORY


@each_row(
    ("kind", "dtype", "axes", "moved"),
    [
        # 40 tokens x 4 heads x 8 x keys and values, 2 bytes read and 2 written
        ("nhd_hnd", "bf16", {}, 40 * 4 * 8 * 2 * 4),
        # written as 1 byte
        ("nhd_hnd/fp8", "bf16", {}, 40 * 4 * 8 * 2 * 3),
        # 8 ranks share 4 heads by twos: each head is written twice
        ("nhd_hnd", "bf16", {"tensor_to": 8}, 2 * 40 * 4 * 8 * 2 * 4),
        # every one of 8 ranks holds the latent
        ("latent", "fp8", {"heads": 1, "tensor_to": 8}, 8 * 40 * 8 * 2),
    ],
)
def test_the_work_of_a_conversion_by_hand(
    kind: str, dtype: str, axes: dict[str, int], moved: int
) -> None:
    one = case(kind, dtype, **axes)
    sizes = {name: np.array([float(size)]) for name, size in one.axes.items()}
    needed = work("kv_conversion", kind=kind, dtype=dtype, direction="", axes=sizes)
    assert float(needed.bytes[0]) == moved
    assert float(needed.flop[0]) == 0.0
