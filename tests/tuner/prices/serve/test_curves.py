"""Interpolation between measured sizes and beyond them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.prices.serve.curves import Grid, build_curve, build_plane


def test_a_power_law_is_met_between_its_points() -> None:
    curve = build_curve(np.array([1, 10, 100]), np.array([1e-6, 1e-5, 1e-4]))
    assert curve.seconds(np.array([3.0, 30.0])) == pytest.approx([3e-6, 3e-5])


def test_beyond_the_largest_size_time_is_in_proportion_and_below_the_smallest_it_stays() -> None:
    curve = build_curve(np.array([4, 8]), np.array([2e-6, 3e-6]))
    assert curve.seconds(np.array([1.0, 80.0])) == pytest.approx([2e-6, 3e-5])


def test_of_several_times_at_one_size_the_fastest_counts() -> None:
    curve = build_curve(np.array([4, 4]), np.array([3e-6, 2e-6]))
    assert curve.seconds(np.array([4.0])) == pytest.approx([2e-6])


def test_a_plane_fills_sizes_that_few_partners_were_measured_with() -> None:
    # Past 20 was measured for one sequence alone: for four it lies between its neighbours.
    plane = build_plane(
        np.array([1, 1, 1, 4, 4]), np.array([10, 20, 40, 10, 40]), np.array([1, 2, 4, 4, 16]) * 1e-6
    )
    assert plane.seconds(np.array([4.0]), np.array([20.0])) == pytest.approx([8e-6])


def test_a_corner_that_did_not_fit_into_memory_grows_with_the_batch() -> None:
    plane = build_plane(
        np.array([1, 1, 4]), np.array([10, 40, 10]), np.array([1.0, 4.0, 4.0]) * 1e-6
    )
    assert plane.seconds(np.array([4.0]), np.array([40.0])) == pytest.approx([16e-6])


def test_a_grid_grows_in_proportion_to_widths_beyond_its_own() -> None:
    grid = Grid(
        log_a_A=np.log(np.array([64.0, 128.0])),
        log_b_B=np.log(np.array([64.0])),
        log_m_M=np.log(np.array([1.0, 8.0])),
        log_s_ABM=np.log(np.array([[[1e-6, 2e-6]], [[2e-6, 4e-6]]])),
    )
    assert grid.curve(a=256.0, b=64.0).seconds(np.array([8.0])) == pytest.approx([8e-6])


@settings(deadline=None, max_examples=50)
@given(
    times=st.lists(st.floats(1e-7, 1e-2), min_size=2, max_size=8),
    at=st.floats(0.1, 1e5),
)
def test_a_value_lies_between_its_neighbours_or_beyond_the_last(
    times: list[float], at: float
) -> None:
    sizes = np.array([2**n for n in range(len(times))])
    found = float(build_curve(sizes, np.array(times)).seconds(np.array([at]))[0])
    if at <= sizes[-1]:
        assert min(times) * (1 - 1e-9) <= found <= max(times) * (1 + 1e-9)
    else:
        assert found == pytest.approx(times[-1] * at / sizes[-1])
