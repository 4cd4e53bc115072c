import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.profilers.testing import gemm_case, gemm_row
from tests.rows import each_row

TIMES = st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=12)


def test_what_a_call_costs_by_hand() -> None:
    # Median 3: repeats up to 9 count, so 10 does not; (1 + 3 + 3 + 9) / 4.
    assert gemm_row(8, 1.0, 3.0, 3.0, 9.0, 10.0).expected_s == 4.0
    assert gemm_row(8, 0.25).expected_s == 0.25


def test_a_skewed_call_costs_more_than_its_median() -> None:
    row = gemm_row(8, 1.0, 1.0, 1.0, 2.5, 2.9)
    assert row.expected_s > row.median_s == 1.0


@settings(deadline=None, max_examples=100)
@given(times_s=TIMES)
def test_what_a_call_costs_is_between_its_fastest_repeat_and_three_medians(
    times_s: list[float],
) -> None:
    row = gemm_row(8, *times_s)
    slack = 1.0 + 1e-9
    assert min(times_s) <= row.expected_s * slack
    assert row.expected_s <= 3.0 * statistics.median(times_s) * slack


@each_row("pause_s", [3.1, 100.0])
def test_a_pause_of_the_machine_is_not_the_calls(pause_s: float) -> None:
    assert gemm_row(8, *[1.0] * 5, pause_s).expected_s == 1.0


def test_a_size_that_no_table_can_hold_is_refused() -> None:
    assert gemm_case(2**63 - 1).axes["m"] == 2**63 - 1
    with pytest.raises(ValueError, match="axis m is more than"):
        gemm_case(2**63)
