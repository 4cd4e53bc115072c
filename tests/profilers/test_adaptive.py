import math
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.adaptive import HOLDOUT_EVERY, Infill
from profilers.held_out import checked
from profilers.kernels import attention, gemm, grouped_gemm, memory_bound
from profilers.kernels.grouped_gemm import row_counts
from profilers.records import AXES, Case, Measurement, MeasurementStatus
from profilers.sampled_sizes import SIZES, drawn, lines
from profilers.schedule import TableSchedule
from profilers.second_pass import INFILL_S, SecondPassTable, next_infill, next_skipped
from tests.expect import present
from tests.profilers.testing import gemm_case, gemm_row
from tests.rows import each_row

KNEE_BYTES = 2**20

Law = Callable[[Case], float]


def sent(size: int) -> Case:
    axes = {"bytes": size, "ranks": 2, "stride": 1, "world": 2}
    return Case(operation="collective", kind="all_reduce", axes=axes)


def copied(size: int) -> Case:
    return Case(operation="copy", kind="device", axes={"bytes": size})


def knee_s(case: Case) -> float:
    """A latency floor up to 1 MiB, then a bandwidth."""
    return 1e-4 * max(1.0, case.axes["bytes"] / KNEE_BYTES)


def row(case: Case, law: Law) -> Measurement:
    return Measurement(case=case, times_s=(law(case),))


def add_infill(rows: list[Measurement], law: Law, *, count: int) -> Infill:
    """Measure `count` further sizes."""
    infill = Infill(rows=rows, rng=np.random.default_rng(0))
    for _ in range(count):
        case = infill.next()
        if case is None:
            break
        rows.append(row(case, law))
    return infill


def test_added_sizes_spread_over_all_lines_and_octaves() -> None:
    grid = [gemm_row(m, 1.0).case for m in (16, 64, 4096)]
    rows = [
        row(case.model_copy(update={"dtype": dtype}), lambda case: 1e-9 * case.axes["m"])
        for case in grid
        for dtype in ("fp32", "bf16")
    ]
    add_infill(rows, lambda case: 1e-9 * case.axes["m"], count=60)
    added = rows[6:]
    for dtype in ("fp32", "bf16"):
        octaves = [math.log2(r.case.axes["m"]) for r in added if r.case.dtype == dtype]
        # Eight octaves, of which the grid left six without a point.
        assert len(octaves) >= 25
        assert sum(6.0 < octave < 12.0 for octave in octaves) > 0.65 * len(octaves)


def test_every_sixth_size_is_a_holdout_size() -> None:
    rows = [row(sent(2**power), knee_s) for power in (10, 15, 22, 26)]
    infill = add_infill(rows, knee_s, count=2 * 12)
    assert len(infill.holdout) == 2 * 12 // HOLDOUT_EVERY
    assert infill.holdout <= {r.case.id for r in rows}


def test_sizes_that_fits_have_seen_are_no_checks_of_them() -> None:
    # Between 64 and 128 bytes lie few whole messages, so that sizes are drawn again and again.
    rows = [row(sent(size), knee_s) for size in (64, 80, 96, 112, 128)]
    begun = {r.case.id for r in rows}
    assert not add_infill(rows, knee_s, count=4 * 12).holdout & begun
    ids = [r.case.id for r in rows]
    assert len(ids) == len(set(ids))


def test_a_line_without_further_sizes_does_not_keep_the_others_from_theirs() -> None:
    # The line with the fewest points: one pair of ranks, all of its three sizes known.
    rows = [row(sent(size), knee_s) for size in (64, 65, 66)]
    wide = [
        Case(
            operation="collective",
            kind="all_reduce",
            axes={"bytes": 2**power, "ranks": 4, "stride": 1, "world": 4},
        )
        for power in (10, 14, 18, 22, 26)
    ]
    rows += [row(case, knee_s) for case in wide]
    known = len(rows)
    add_infill(rows, knee_s, count=40)
    assert len(rows) == known + 40
    assert {r.case.axes["ranks"] for r in rows[known:]} == {4}


def test_cheap_sizes_are_preferred_where_they_add_as_much() -> None:
    def mean_octave(cost_s: Callable[[Case], float]) -> float:
        rows = [row(sent(2**power), knee_s) for power in (10, 18, 26)]
        infill = Infill(rows=rows, rng=np.random.default_rng(0), cost_s=cost_s)
        found = [infill.next() for _ in range(12)]
        return float(np.mean([math.log2(case.axes["bytes"]) for case in found if case]))

    by_size = mean_octave(lambda case: 0.01 + case.axes["bytes"] / 2**20)
    assert by_size < mean_octave(lambda _case: 1.0) - 1.0


def test_sizes_are_drawn_alike_between_unequal_ones() -> None:
    assert Infill(rows=[gemm_row(64, 1.0)], rng=np.random.default_rng(0)).next() is None
    failed = Measurement(case=sent(64), status=MeasurementStatus.FAILED, error="no")
    assert Infill(rows=[failed], rng=np.random.default_rng(0)).next() is None
    assert Infill(rows=[], rng=np.random.default_rng(0)).next() is None

    def proposed() -> list[str]:
        rows = [gemm_row(m, m * 1e-6) for m in (16, 64, 256)]
        add_infill(rows, lambda case: 1e-6 * case.axes["m"] ** 0.9, count=12)
        return [r.case.id for r in rows]

    assert proposed() == proposed()


def test_left_out_sizes_are_compared_with_the_curve_of_the_others() -> None:
    rows = [row(sent(2**power), knee_s) for power in (21, 23, 25)]
    # Between 2 and 8 MiB time is proportional: 4e-4 s are predicted, and 5e-4 s were measured.
    rows.append(Measurement(case=sent(2**22), times_s=(5e-4,)))
    found = present(checked(rows, left_out={sent(2**22).id}))
    assert found.sizes == 1
    assert abs(found.median_ratio - 0.2) < 1e-6
    assert checked(rows, left_out=set()) is None


def test_the_slowest_rank_counts_among_left_out_sizes_and_failures_do_not() -> None:
    rows = [row(sent(2**power), knee_s) for power in (21, 23)]
    for rank, seconds in enumerate((2e-4, 4e-4)):
        rows.append(Measurement(case=sent(2**22), times_s=(seconds,), rank=rank))
    rows.append(Measurement(case=sent(3 * 2**20), status=MeasurementStatus.FAILED, error="no"))
    found = present(checked(rows, left_out={sent(2**22).id, sent(3 * 2**20).id}))
    assert (found.sizes, round(found.p90_ratio, 6)) == (1, 0.0)


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


def test_octaves_count_equally_and_widths_are_aligned() -> None:
    rng = np.random.default_rng(0)
    line = [gemm_case(16), gemm_case(4096)]
    sizes = [drawn(line, rng=rng).axes["m"] for _ in range(400)]
    # 256 is half way from 16 to 4096 in octaves.
    assert 160 < sum(size < 256 for size in sizes) < 240
    assert sum(size % 2 for size in sizes) > 120
    line = [gemm_case(64, n=n, k=k) for n, k in ((512, 2048), (8192, 512), (50304, 2048))]
    assert all(drawn(line, rng=rng).axes[axis] % 128 == 0 for axis in "nk" for _ in range(50))


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


def second_pass(rows: list[Measurement], *, weight: float = 1.0) -> SecondPassTable:
    infill = Infill(rows=rows, rng=np.random.default_rng(0))
    return SecondPassTable(
        weight=weight, schedule=TableSchedule(requested=[], grid=[], rows=rows), infill=infill
    )


def quick() -> list[Measurement]:
    return [gemm_row(m, 1e-6 * m) for m in (16, 64, 256)]


def test_time_goes_to_tables_by_weight() -> None:
    tables = [second_pass(quick(), weight=1.0), second_pass(quick(), weight=3.0)]
    counts = [0, 0]
    for _ in range(140):
        place, step = present(next_infill(tables, left_s=10.0))
        assert step.budget_s == INFILL_S
        tables[place].spent_s += 1.0
        counts[place] += 1
    assert counts == [35, 105]


def test_the_round_is_over_without_time_or_tables() -> None:
    slow = [gemm_row(m, 0.1 * m) for m in (16, 64, 256)]
    # 11 runs of at least 1.6 s
    assert next_infill([second_pass(slow)], left_s=5.0) is None
    chosen = present(next_infill([second_pass(slow), None, second_pass(quick())], left_s=5.0))
    assert chosen[0] == 2
    assert next_infill([second_pass(quick())], left_s=0.0) is None
    assert next_infill([None], left_s=9.0) is None
    assert next_infill([second_pass([gemm_row(64, 1.0)])], left_s=99.0) is None


def test_the_table_that_lacks_most_is_taken_up_first() -> None:
    known = [gemm_row(m, 1e-3) for m in (16, 32, 64)]
    plans = [
        TableSchedule(requested=[], grid=[gemm_case(m) for m in sizes], rows=rows)
        for rows, sizes in ((known, (65, 66)), (known[:1], (17, 18)), (known, ()))
    ]
    for one in plans:
        # Every table gets its first case.
        while one.next(left_s=0.0):
            pass
    assert next_skipped(plans, left_s=0.0) is None
    order = []
    while chosen := next_skipped(plans, left_s=1.0):
        place, step = chosen
        order.append((place, step.case.axes["m"]))
    assert order == [(1, 18), (0, 66)]
