import numpy as np

from profilers.adaptive import Infill
from profilers.records import Measurement
from profilers.schedule import TableSchedule
from profilers.second_pass import INFILL_S, SecondPassTable, next_infill, next_skipped
from tests.profilers.testing import gemm_case, gemm_row


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
        chosen = next_infill(tables, left_s=10.0)
        assert chosen is not None
        place, step = chosen
        assert step.budget_s == INFILL_S
        tables[place].spent_s += 1.0
        counts[place] += 1
    assert counts == [35, 105]


def test_sizes_that_would_not_end_in_time_are_not_begun() -> None:
    slow = [gemm_row(m, 0.1 * m) for m in (16, 64, 256)]
    # 11 runs of at least 1.6 s
    assert next_infill([second_pass(slow)], left_s=5.0) is None
    chosen = next_infill([second_pass(slow), None, second_pass(quick())], left_s=5.0)
    assert chosen is not None
    assert chosen[0] == 2


def test_without_time_or_tables_the_round_is_over() -> None:
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
