import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.kernels import attention, gemm, grouped_gemm, memory_bound
from profilers.kernels.grouped_gemm import row_counts
from profilers.records import AXES, Case, Measurement, MeasurementStatus
from profilers.sampled_sizes import SIZES, drawn, lines
from tests.profilers.testing import gemm_case
from tests.rows import each_row

CPU = torch.device("cpu")
GRIDS = {
    module.__name__: [
        Measurement(case=case, times_s=(1.0,)) for case in module.cases(CPU, ("fp32", "bf16"))
    ]
    for module in (gemm, grouped_gemm, attention, memory_bound)
}


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), grid=st.sampled_from(sorted(GRIDS)))
def test_what_is_drawn_lies_inside_the_line_and_is_possible(seed: int, grid: str) -> None:
    rng = np.random.default_rng(seed)
    for line in lines(GRIDS[grid]).values():
        case = drawn(line, rng=rng)
        assert (case.kind, case.dtype) == (line[0].kind, line[0].dtype)
        for axis in AXES[case.operation]:
            sizes = [one.axes[axis] for one in line]
            assert min(sizes) <= case.axes[axis] <= max(sizes)
        if case.operation == "grouped_gemm":
            axes = case.axes
            experts, tokens, largest = axes["experts"], axes["tokens"], axes["largest"]
            assert sum(row_counts(experts=experts, tokens=tokens, largest=largest)) == tokens
        if case.operation == "attention":
            assert case.axes["heads"] % case.axes["kv_heads"] == 0
            assert case.axes["head_dim"] % 8 == 0
        if case.kind in ("permute", "unpermute"):
            assert case.axes["rows"] % 2 == 0


def test_octaves_count_equally_and_sizes_need_not_be_round() -> None:
    rng = np.random.default_rng(0)
    line = [gemm_case(16), gemm_case(4096)]
    sizes = [drawn(line, rng=rng).axes["m"] for _ in range(400)]
    # 256 is half way from 16 to 4096 in octaves.
    assert 160 < sum(size < 256 for size in sizes) < 240
    assert sum(size % 2 for size in sizes) > 120


def test_messages_are_drawn_within_their_group_and_failures_are_no_sizes() -> None:
    def row(size: int, ranks: int, status: MeasurementStatus = MeasurementStatus.OK) -> Measurement:
        axes = {"bytes": size, "ranks": ranks, "stride": 1, "world": 4}
        case = Case(operation="collective", kind="all_to_all", axes=axes)
        times_s = (1.0,) if status is MeasurementStatus.OK else ()
        return Measurement(case=case, times_s=times_s, status=status)

    rows = [row(64, 2), row(128, 2), row(4096, 4), row(2**30, 4, MeasurementStatus.FAILED)]
    pair, four = lines(rows).values()
    assert [len(pair), len(four)] == [2, 1]
    assert drawn(four, rng=np.random.default_rng(0)) == four[0]


@each_row("operation", sorted(SIZES))
def test_sizes_are_axes(operation: str) -> None:
    assert set(SIZES[operation]) <= set(AXES[operation])


def test_widths_are_aligned_as_the_measured_ones_are() -> None:
    rng = np.random.default_rng(0)
    line = [gemm_case(64, n=n, k=k) for n, k in ((512, 2048), (8192, 512), (50304, 2048))]
    assert all(drawn(line, rng=rng).axes[axis] % 128 == 0 for axis in "nk" for _ in range(50))
