import pytest

from tests.rows import each_row
from tuner.search.train.memory_band import peak_band


def test_a_peak_is_expected_between_the_largest_errors() -> None:
    # 88 of 100: between 78.57 and 100.
    assert peak_band(88.0) == pytest.approx((88.0 / 1.12, 100.0))


@each_row("error_ratio", [-0.091, -0.014, -0.004, -0.117, -0.087, -0.060, 0.024])
def test_published_peaks_lie_inside_the_band(error_ratio: float) -> None:
    low, high = peak_band(100.0)
    assert low <= 100.0 / (1.0 + error_ratio) <= high
