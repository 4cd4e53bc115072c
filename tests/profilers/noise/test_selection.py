"""Which rows count of several sessions of one case."""

import math

import pytest

from profilers.noise.selection import SAME_RATIO, CaseSession, RowSelection
from profilers.noise.sentinel import EXPONENTS
from profilers.records import Case, Measurement, MeasurementStatus
from tests.profilers.testing import gemm_case, gemm_row
from tests.rows import each_row

FAILED = Measurement(case=gemm_case(8), status=MeasurementStatus.FAILED, error="no")


def with_sentinel(
    *rows: Measurement, undisturbed_s: float = 1.0, slowdown: float = 1.0
) -> CaseSession:
    return CaseSession(rows=rows, undisturbed_s=undisturbed_s, slowdown=slowdown)


def times_of(selection: RowSelection) -> list[tuple[float, ...]]:
    return [row.times_s for row in selection.rows]


def test_of_several_sessions_the_one_with_the_fastest_slowest_rank_counts() -> None:
    selection = RowSelection(rows=[])
    selection.add(CaseSession(rows=[gemm_row(8, 3.0), gemm_row(8, 4.0, rank=1)]))
    selection.add(CaseSession(rows=[gemm_row(16, 7.0), gemm_row(16, 7.0, rank=1)]))
    selection.add(CaseSession(rows=[gemm_row(8, 1.0), gemm_row(8, 5.0, rank=1)]))
    assert [row.median_s for row in selection.rows] == [3.0, 4.0, 7.0, 7.0]
    selection.add(CaseSession(rows=[gemm_row(8, 3.5), gemm_row(8, 2.0, rank=1)]))
    assert [row.median_s for row in selection.rows] == [3.5, 2.0, 7.0, 7.0]


def test_of_collectives_the_repeats_of_all_sessions_count() -> None:
    axes = {"bytes": 8, "ranks": 2, "stride": 1, "world": 2}
    case = Case(operation="collective", kind="all_gather", axes=axes)
    failed = Measurement(case=case, status=MeasurementStatus.FAILED, error="a peer failed")
    slow, fast = (Measurement(case=case, times_s=times_s) for times_s in ((3.0, 4.0), (1.0,)))
    selection = RowSelection(rows=[])
    for row in (failed, slow, fast, failed):
        selection.add(CaseSession(rows=[row]))
    assert selection.rows == [Measurement(case=case, times_s=(3.0, 4.0, 1.0))]


def test_directions_are_selected_separately() -> None:
    def session(forward_s: float, backward_s: float) -> CaseSession:
        backward = gemm_case(8).model_copy(update={"direction": "backward"})
        rows = [gemm_row(8, forward_s), Measurement(case=backward, times_s=(backward_s,))]
        return CaseSession(rows=rows)

    selection = RowSelection(rows=[])
    selection.add(session(1.0, 4.0))
    selection.add(session(2.0, 3.0))
    assert [row.median_s for row in selection.rows] == [1.0, 3.0]


@each_row("undisturbed_s", [0.0, 1.0])
def test_a_failed_session_removes_nothing_and_a_successful_one_replaces_it(
    undisturbed_s: float,
) -> None:
    selection = RowSelection(rows=[FAILED])
    selection.add(with_sentinel(gemm_row(8, 1.0), undisturbed_s=undisturbed_s))
    selection.add(with_sentinel(FAILED, undisturbed_s=undisturbed_s))
    assert selection.rows == [gemm_row(8, 1.0)]


def test_with_a_sentinel_all_repeats_count_but_the_slowest_third_of_the_sessions() -> None:
    selection = RowSelection(rows=[])
    for seconds, kept in (
        (3.0, {3.0}),
        (2.0, {2.0, 3.0}),
        (9.0, {2.0, 3.0}),
        (1.0, {1.0, 2.0, 3.0}),
    ):
        selection.add(with_sentinel(gemm_row(8, seconds, seconds), gemm_row(8, 5.0, rank=1)))
        assert set(selection.rows[0].times_s) == kept
        assert len(selection.rows[0].times_s) == 2 * len(kept)
        assert set(selection.rows[1].times_s) == {5.0}


def test_earlier_rows_are_scaled_when_the_machine_turns_out_to_be_faster() -> None:
    stored = Case(operation="storage", kind="write", axes={"bytes": 8})
    selection = RowSelection(rows=[gemm_row(4, 1.0)])
    selection.add(with_sentinel(gemm_row(8, 2.0), undisturbed_s=3.0, slowdown=1.1))
    selection.add(
        with_sentinel(FAILED.model_copy(update={"case": gemm_case(32)}), undisturbed_s=3.0)
    )
    selection.add(CaseSession(rows=[Measurement(case=stored, times_s=(1.0,))]))
    selection.add(with_sentinel(gemm_row(16, 1.0), undisturbed_s=1.5))
    # Neither what an earlier run measured nor what has no sentinel, nor what failed.
    assert times_of(selection) == [(1.0,), (1.0,), (), (1.0,), (1.0,)]
    # The last session was compared with what is known by now.
    assert selection.slowdowns == pytest.approx([2.2, 2.0, 1.0])
    selection.add(with_sentinel(gemm_row(8, 3.0), undisturbed_s=1.5))
    assert selection.rows[1].times_s == (1.0, 3.0)
    selection.rescale(0.75)
    assert selection.rows[1].times_s == (0.5, 1.5)
    # The usual scatter of readings changes nothing.
    selection.rescale(0.75 * (1.0 + 0.5 * SAME_RATIO))
    assert selection.rows[1].times_s == (0.5, 1.5)


def test_operations_that_slow_down_more_are_scaled_more() -> None:
    selection = RowSelection(rows=[])
    case = Case(operation="memory_bound", kind="swiglu", axes={"rows": 8, "width": 8})
    selection.add(
        with_sentinel(Measurement(case=case, times_s=(4.0,)), undisturbed_s=2.0, slowdown=1.5)
    )
    selection.rescale(1.0)
    power = EXPONENTS["memory_bound"]
    assert selection.rows[0].times_s == pytest.approx((4.0 / 2.0**power,))
    assert selection.slowdowns == pytest.approx([1.5 * 2.0**power])


def test_an_earlier_run_counts_as_a_session() -> None:
    selection = RowSelection(rows=[gemm_row(8, 2.0, 2.0), gemm_row(16, 4.0)])
    selection.add(with_sentinel(gemm_row(8, 3.0)))
    assert times_of(selection) == [(2.0, 2.0, 3.0), (4.0,)]


def test_gains_are_on_one_scale() -> None:
    name = gemm_case(8).id
    selection = RowSelection(rows=[])
    selection.add(with_sentinel(gemm_row(8, 4.0), undisturbed_s=2.0))
    assert selection.gains == {}
    # The machine is twice as fast as was thought, and the size takes what it took.
    selection.add(with_sentinel(gemm_row(8, 2.0), undisturbed_s=1.0))
    assert selection.gains == {name: pytest.approx(0.0)}
    selection.add(with_sentinel(gemm_row(8, 1.0)))
    assert selection.gains == {name: pytest.approx(math.log(2.0))}
    selection.add(with_sentinel(gemm_row(8, 9.0)))
    assert selection.gains == {name: 0.0}
    selection.add(with_sentinel(FAILED))
    assert selection.gains == {name: 0.0}


def test_changes_are_noted() -> None:
    selection = RowSelection(rows=[gemm_row(8, 4.0)])
    assert not selection.is_changed
    selection.add(CaseSession(rows=[gemm_row(16, 4.0)]))
    assert selection.is_changed


def test_slowdowns_are_noted() -> None:
    selection = RowSelection(rows=[])
    selection.add(with_sentinel(gemm_row(8, 2.0), slowdown=1.5))
    selection.add(CaseSession(rows=[gemm_row(16, 2.0)]))
    assert selection.slowdowns == [1.5]
