from profilers.records import Case, Measurement
from profilers.schedule import (
    CASE_OVERHEAD_S,
    LONG_RUNS_PER_CASE,
    MAX_CASE_S,
    RUNS_PER_CASE,
    TableSchedule,
    distinct,
    key,
)
from tests.expect import present
from tests.profilers.testing import gemm_case, gemm_row


def schedule(
    *, requested: list[Case], grid: list[Case], rows: list[Measurement] | None = None
) -> TableSchedule:
    return TableSchedule(requested=requested, grid=grid, rows=rows or [])


def order_of(course: TableSchedule, *, left_s: float) -> list[int]:
    order = []
    while step := course.next(left_s=left_s):
        order.append(step.case.axes["m"])
    return order


def test_requested_cases_come_first_and_known_ones_not_again() -> None:
    course = schedule(
        requested=[gemm_case(300), gemm_case(3)], grid=[gemm_case(m) for m in (64, 8, 300)]
    )
    assert order_of(course, left_s=10.0) == [3, 300, 8, 64]
    course = schedule(requested=[gemm_case(8)], grid=[gemm_case(64)], rows=[gemm_row(8, 1.0)])
    assert order_of(course, left_s=1e9) == [64]
    backward = gemm_case(8).model_copy(update={"direction": "backward"})
    (only,) = distinct([backward, gemm_case(8)])
    assert only.direction == "forward"
    assert key(backward) == key(gemm_case(8))


def test_arrival_skew_starts_with_the_work_that_steps_have() -> None:
    grid = [
        Case(
            operation="rendezvous",
            axes={"work_us": work_us, "ranks": ranks, "stride": 1, "world": 4},
        )
        for ranks in (2, 4)
        for work_us in (250, 1000, 4000, 16000, 64000)
    ]
    course, order = schedule(requested=[], grid=grid), []
    while step := course.next(left_s=1e9):
        order.append((step.case.axes["work_us"], step.case.axes["ranks"]))
    expected = (4000, 1000, 16000, 250, 64000)
    assert order == [(work_us, ranks) for work_us in expected for ranks in (2, 4)]


def test_cases_that_would_outlast_the_table_are_skipped() -> None:
    course = schedule(requested=[gemm_case(2)], grid=[gemm_case(1), gemm_case(3)])
    assert order_of(course, left_s=0.0) == [2]
    assert course.skipped == 2
    # 1 s for m = 64 means 4 runs = 4 s for m = 65 and about 256 s for m = 4096
    course = schedule(requested=[], grid=[gemm_case(65), gemm_case(4096)], rows=[gemm_row(64, 1.0)])
    assert order_of(course, left_s=150.0) == [65]
    assert course.skipped == 1
    course = schedule(requested=[], grid=[gemm_case(65), gemm_case(66)], rows=[gemm_row(64, 0.1)])
    step = present(course.next(left_s=1.2))
    # Both need about 0.51 s at least; what is left of 1.2 s is shared evenly.
    assert 0.07 <= step.budget_s <= 0.1


def test_skipped_cases_that_end_in_time_are_measured_from_cheap_to_expensive() -> None:
    sizes = [gemm_case(m) for m in (4096, 512, 65)]
    course = schedule(requested=[], grid=sizes, rows=[gemm_row(64, 1.0)])
    assert order_of(course, left_s=15.0) == [65]
    assert course.skipped_ratio == 2.0
    # 4 runs, of 5 s and more each, and of some 40 s.
    assert course.next_skipped(left_s=10.0) is None
    step = present(course.next_skipped(left_s=100.0))
    assert step.case.axes["m"] == 512
    assert step.budget_s == MAX_CASE_S
    assert course.skipped == 1
    assert course.next_skipped(left_s=100.0) is None


def test_a_checkpoint_that_would_outlast_the_table_with_its_save_is_skipped() -> None:
    # Of 16 MiB a load takes 15 ms; with the save before it, all loads take 0.3 s.
    small, medium, large = (
        Case(operation="checkpoint_load", kind="distributed", axes={"bytes": 2**power})
        for power in (24, 26, 28)
    )
    course = schedule(requested=[], grid=[small, medium, large])
    for expected, load_s, whole_s in ((small, 0.015, 0.3), (medium, 0.12, 1.2)):
        assert present(course.next(left_s=4.0)).case == expected
        row = Measurement(case=expected, times_s=(load_s,) * 3)
        course.add([row, row.model_copy(update={"rank": 1})], spent_s=whole_s)
    # Five loads of 256 MiB would take 2.4 s, all of it 4.8.
    assert course.expected_s(large) == 4.8
    assert course.next(left_s=4.0) is None
    assert course.skipped == 1
    assert course.next_skipped(left_s=5.0) is not None


def test_a_session_costs_its_runs_and_an_overhead() -> None:
    course = schedule(requested=[], grid=[], rows=[gemm_row(64, 0.01), gemm_row(4096, 1.0)])
    short, long = (course.expected_s(gemm_case(m)) for m in (64, 4096))
    assert short == RUNS_PER_CASE * 0.01
    assert long == LONG_RUNS_PER_CASE * 1.0
    course = schedule(requested=[], grid=[], rows=[gemm_row(64, 0.01)])
    assert course.cost_s(gemm_case(64)) == CASE_OVERHEAD_S + RUNS_PER_CASE * 0.01


def test_repeats_of_a_grid_are_limited_where_other_sizes_add_more_and_requested_ones_are_not() -> (
    None
):
    course = TableSchedule(requested=[gemm_case(2)], grid=[gemm_case(1)], rows=[], grid_case_s=0.05)
    requested, listed = course.next(left_s=100.0), course.next(left_s=100.0)
    assert requested is not None
    assert (requested.case.axes["m"], requested.budget_s) == (2, MAX_CASE_S)
    assert listed is not None
    assert (listed.case.axes["m"], listed.budget_s) == (1, 0.05)
