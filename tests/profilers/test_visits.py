"""What counts of several visits to one case."""

import math

import pytest

from profilers.records import Case, Measurement, Status
from profilers.sentinel import POWERS
from profilers.visits import SAME_RATIO, Visit, Visits
from tests.profilers.testing import gemm_case, gemm_row
from tests.rows import each_row

FAILED = Measurement(case=gemm_case(8), status=Status.FAILED, error="no")


def watched(*rows: Measurement, quickest_s: float = 1.0, slowness: float = 1.0) -> Visit:
    return Visit(rows=rows, quickest_s=quickest_s, slowness=slowness)


def times_of(visits: Visits) -> list[tuple[float, ...]]:
    return [row.times_s for row in visits.rows]


def test_of_several_visits_the_one_with_the_fastest_slowest_rank_stays() -> None:
    visits = Visits(rows=[])
    visits.add(Visit(rows=[gemm_row(8, 3.0), gemm_row(8, 4.0, rank=1)]))
    visits.add(Visit(rows=[gemm_row(16, 7.0), gemm_row(16, 7.0, rank=1)]))
    visits.add(Visit(rows=[gemm_row(8, 1.0), gemm_row(8, 5.0, rank=1)]))
    assert [row.median_s for row in visits.rows] == [3.0, 4.0, 7.0, 7.0]
    visits.add(Visit(rows=[gemm_row(8, 3.5), gemm_row(8, 2.0, rank=1)]))
    assert [row.median_s for row in visits.rows] == [3.5, 2.0, 7.0, 7.0]


def test_of_collectives_the_repeats_of_all_visits_stay() -> None:
    axes = {"bytes": 8, "ranks": 2, "stride": 1, "world": 2}
    case = Case(operation="collective", kind="all_gather", axes=axes)
    failed = Measurement(case=case, status=Status.FAILED, error="a peer failed")
    slow, fast = (Measurement(case=case, times_s=times_s) for times_s in ((3.0, 4.0), (1.0,)))
    visits = Visits(rows=[])
    for row in (failed, slow, fast, failed):
        visits.add(Visit(rows=[row]))
    assert visits.rows == [Measurement(case=case, times_s=(3.0, 4.0, 1.0))]


def test_directions_are_told_apart() -> None:
    def visit(forward_s: float, backward_s: float) -> Visit:
        backward = gemm_case(8).model_copy(update={"direction": "backward"})
        rows = [gemm_row(8, forward_s), Measurement(case=backward, times_s=(backward_s,))]
        return Visit(rows=rows)

    visits = Visits(rows=[])
    visits.add(visit(1.0, 4.0))
    visits.add(visit(2.0, 3.0))
    assert [row.median_s for row in visits.rows] == [1.0, 3.0]


@each_row("quickest_s", [0.0, 1.0])
def test_a_visit_that_fails_takes_nothing_away_and_one_that_works_replaces_it(
    quickest_s: float,
) -> None:
    visits = Visits(rows=[FAILED])
    visits.add(watched(gemm_row(8, 1.0), quickest_s=quickest_s))
    visits.add(watched(FAILED, quickest_s=quickest_s))
    assert visits.rows == [gemm_row(8, 1.0)]


def test_where_a_sentinel_looked_all_repeats_count_but_the_slowest_third_of_the_visits() -> None:
    visits = Visits(rows=[])
    for seconds, kept in (
        (3.0, {3.0}),
        (2.0, {2.0, 3.0}),
        (9.0, {2.0, 3.0}),
        (1.0, {1.0, 2.0, 3.0}),
    ):
        visits.add(watched(gemm_row(8, seconds, seconds), gemm_row(8, 5.0, rank=1)))
        assert set(visits.rows[0].times_s) == kept
        assert len(visits.rows[0].times_s) == 2 * len(kept)
        assert set(visits.rows[1].times_s) == {5.0}


def test_what_was_measured_before_the_machine_was_seen_undisturbed_is_brought_to_that() -> None:
    stored = Case(operation="storage", kind="write", axes={"bytes": 8})
    visits = Visits(rows=[gemm_row(4, 1.0)])
    visits.add(watched(gemm_row(8, 2.0), quickest_s=3.0, slowness=1.1))
    visits.add(watched(FAILED.model_copy(update={"case": gemm_case(32)}), quickest_s=3.0))
    visits.add(Visit(rows=[Measurement(case=stored, times_s=(1.0,))]))
    visits.add(watched(gemm_row(16, 1.0), quickest_s=1.5))
    # Neither what an earlier run measured nor what nobody looked at, nor what failed.
    assert times_of(visits) == [(1.0,), (1.0,), (), (1.0,), (1.0,)]
    # The last visit was compared with what is known by now.
    assert visits.slowness == pytest.approx([2.2, 2.0, 1.0])
    visits.add(watched(gemm_row(8, 3.0), quickest_s=1.5))
    assert visits.rows[1].times_s == (1.0, 3.0)
    visits.rescale(0.75)
    assert visits.rows[1].times_s == (0.5, 1.5)
    # What readings differ by anyhow changes nothing.
    visits.rescale(0.75 * (1.0 + 0.5 * SAME_RATIO))
    assert visits.rows[1].times_s == (0.5, 1.5)


def test_what_suffers_more_is_brought_further() -> None:
    visits = Visits(rows=[])
    case = Case(operation="memory_bound", kind="swiglu", axes={"rows": 8, "width": 8})
    visits.add(watched(Measurement(case=case, times_s=(4.0,)), quickest_s=2.0, slowness=1.5))
    visits.rescale(1.0)
    power = POWERS["memory_bound"]
    assert visits.rows[0].times_s == pytest.approx((4.0 / 2.0**power,))
    assert visits.slowness == pytest.approx([1.5 * 2.0**power])


def test_an_earlier_run_was_a_visit() -> None:
    visits = Visits(rows=[gemm_row(8, 2.0, 2.0), gemm_row(16, 4.0)])
    visits.add(watched(gemm_row(8, 3.0)))
    assert times_of(visits) == [(2.0, 2.0, 3.0), (4.0,)]


def test_what_a_visit_brought_is_told_on_one_scale() -> None:
    name = gemm_case(8).id
    visits = Visits(rows=[])
    visits.add(watched(gemm_row(8, 4.0), quickest_s=2.0))
    assert visits.gains == {}
    # The machine is twice as quick as was thought, and the size takes what it took.
    visits.add(watched(gemm_row(8, 2.0), quickest_s=1.0))
    assert visits.gains == {name: pytest.approx(0.0)}
    visits.add(watched(gemm_row(8, 1.0)))
    assert visits.gains == {name: pytest.approx(math.log(2.0))}
    visits.add(watched(gemm_row(8, 9.0)))
    assert visits.gains == {name: 0.0}
    visits.add(watched(FAILED))
    assert visits.gains == {name: 0.0}


def test_whether_anything_came_is_known() -> None:
    visits = Visits(rows=[gemm_row(8, 4.0)])
    assert not visits.is_changed
    visits.add(Visit(rows=[gemm_row(16, 4.0)]))
    assert visits.is_changed


def test_how_much_was_taken_out_is_known() -> None:
    visits = Visits(rows=[])
    visits.add(watched(gemm_row(8, 2.0), slowness=1.5))
    visits.add(Visit(rows=[gemm_row(16, 2.0)]))
    assert visits.slowness == [1.5]
