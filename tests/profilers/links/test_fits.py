"""Lines through link times."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.links.fits import fit_link
from tests.rows import each_row

SIZES = [2.0**power for power in range(10, 27, 2)]


@settings(deadline=None, max_examples=60)
@given(latency_s=st.floats(1e-7, 1e-2), rate=st.floats(1e7, 1e12))
def test_a_line_is_recovered(latency_s: float, rate: float) -> None:
    fit = fit_link(SIZES, [latency_s + size / rate for size in SIZES])
    assert fit.residual_ratio < 1e-6
    for size in (1.5e3, 7e5, 5e7):
        assert fit.seconds(size) == pytest.approx(latency_s + size / rate, rel=1e-5)


def test_a_change_of_protocol_is_two_lines() -> None:
    times = [1e-5 + size / 1e9 if size <= 2**18 else 1e-4 + size / 2e10 for size in SIZES]
    fit = fit_link(SIZES, times)
    assert len(fit.lines) == 2
    assert fit.latency_s == pytest.approx(1e-5, rel=0.2)
    assert fit.bytes_per_s == pytest.approx(2e10, rel=0.2)


def test_it_says_where_it_holds() -> None:
    fit = fit_link([1e3, 1e6], [1e-5, 1e-3])
    assert (fit.lines[0].smallest_bytes, fit.largest_bytes) == (1e3, 1e6)


def test_times_that_shrink_with_size_do_not_give_a_negative_bandwidth() -> None:
    fit = fit_link([1e3, 1e6], [2e-3, 1e-3])
    assert fit.bytes_per_s > 0.0
    assert fit.seconds(1e6) > 0.0


@each_row("times", [[1e-3], [0.0, 1e-3]])
def test_too_little_to_fit_is_refused(times: list[float]) -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit_link(SIZES[: len(times)], times)
