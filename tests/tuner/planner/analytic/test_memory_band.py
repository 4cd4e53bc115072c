import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.planner.analytic.memory_band import above_ratio, peak_band


def test_a_share_of_the_band_lies_above_the_limit() -> None:
    # 88 of 100: between 78.57 and 100, so with a limit of 94 six of 21.43 lie above.
    low, high = peak_band(88.0)
    assert (low, high) == pytest.approx((88.0 / 1.12, 100.0))
    (above,) = above_ratio(np.array([88.0]), limit_bytes=94.0)
    assert above == pytest.approx(6.0 / (100.0 - 88.0 / 1.12))


def test_a_band_below_the_limit_has_nothing_above_it_and_one_beyond_it_has_all() -> None:
    assert list(above_ratio(np.array([50.0, 200.0]), limit_bytes=100.0)) == [0.0, 1.0]


@given(
    st.lists(st.floats(1.0, 1e12), min_size=2, max_size=2).map(sorted),
    st.floats(1.0, 1e12),
)
@settings(deadline=None, max_examples=60)
def test_a_fuller_device_has_no_less_above(peaks: list[float], limit: float) -> None:
    less, more = above_ratio(np.array(peaks), limit_bytes=limit)
    assert 0.0 <= less <= more <= 1.0
