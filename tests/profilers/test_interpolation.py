import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.interpolation import (
    MAX_POINTS,
    TUNED_POINTS,
    KernelCurve,
    NeighbourCurve,
    fit,
    fit_curves,
)
from profilers.records import Case, Measurement, MeasurementStatus
from profilers.series import Series
from tests.profilers.testing import fake_profile, gemm_case, gemm_row
from tests.rows import each_row

GEMM = Series("gemm", "", "fp32", "forward")
SENT = Series("collective", "all_reduce", "", "")


def model_s(m: float, n: float, k: float) -> float:
    return 1e-5 + 2.0 * m * n * k / 1e11 + 4.0 * (m * k + n * k + m * n) / 1e10


def ragged_s(rows: float, width: float) -> float:
    """Elements that fill no vector of 16 take fifty times as long."""
    return 1e-9 * rows * (width + 50.0 * (width % 16))


WIDTHS = (64, 128, 256, 512, 1024, 2048)
GRID: list[tuple[int, ...]] = [
    (m, n, k) for m in (64, 512, 4096) for n in (128, 1024) for k in (128, 1024)
]


def test_a_physical_law_is_recovered_from_its_points() -> None:
    curve = fit(GEMM, {place: model_s(*place) for place in GRID})
    assert isinstance(curve, KernelCurve)
    assert curve.coefficients == pytest.approx([1e-5, 1e-11, 1e-10], rel=1e-6)
    seconds, extrapolated = curve.predict(np.array([[300.0, 700.0, 200.0]]))
    assert seconds[0] == pytest.approx(model_s(300, 700, 200), rel=1e-6)
    assert not extrapolated[0]
    queries = np.array([[4096 * 1.04, 128, 128], [4096 * 1.06, 128, 128], [60.0, 128, 128]])
    assert curve.predict(queries)[1].tolist() == [False, True, True]


@settings(deadline=None, max_examples=50)
@given(noise=st.lists(st.floats(0.2, 5.0), min_size=len(GRID), max_size=len(GRID)))
def test_every_measured_point_is_returned_exactly(noise: list[float]) -> None:
    points = {place: model_s(*place) * n for place, n in zip(GRID, noise, strict=True)}
    seconds, extrapolated = fit(GEMM, points).predict(np.array(list(points), dtype=np.float64))
    assert seconds == pytest.approx(list(points.values()), rel=1e-6)
    assert not extrapolated.any()


@settings(deadline=None, max_examples=50)
@given(noise=st.lists(st.floats(0.2, 5.0), min_size=len(GRID), max_size=len(GRID)))
def test_far_away_only_the_base_is_left(noise: list[float]) -> None:
    points = {place: model_s(*place) * n for place, n in zip(GRID, noise, strict=True)}
    curve = fit(GEMM, points)
    assert isinstance(curve, KernelCurve)
    assert (curve.coefficients >= 0.0).all()
    far = np.array([[2.0**60, 2.0**60, 2.0**60]])
    seconds, extrapolated = curve.predict(far)
    assert seconds == pytest.approx(curve.base_s(far), rel=1e-3)
    assert extrapolated.all()


@settings(deadline=None, max_examples=50)
@given(order=st.permutations(range(len(GRID))))
def test_the_order_of_the_points_does_not_matter(order: list[int]) -> None:
    points = {place: model_s(*place) * (1.0 + index) for index, place in enumerate(GRID)}
    shuffled = {GRID[index]: points[GRID[index]] for index in order}
    queries = np.array([[100.0, 300.0, 500.0]])
    assert fit(GEMM, shuffled).predict(queries)[0] == fit(GEMM, points).predict(queries)[0]


def scattered(count: int, *, noise_ratio: float) -> dict[tuple[int, ...], float]:
    rng = np.random.default_rng(0)
    sizes_NA = np.exp(rng.uniform(np.log(64), np.log(2048), (count, 3))).round().astype(int)
    noise_N = np.exp(noise_ratio * rng.standard_normal(count))
    return {
        (int(m), int(n), int(k)): model_s(m, n, k) * noise
        for (m, n, k), noise in zip(sizes_NA, noise_N, strict=True)
    }


def test_many_points_average_noise_out_or_are_returned() -> None:
    curve = fit(GEMM, scattered(120, noise_ratio=0.1))
    truth = {place: model_s(*place) for place in scattered(300, noise_ratio=0.0)}
    seconds, _ = curve.predict(np.array(list(truth), dtype=np.float64))
    errors = np.abs(seconds / np.array(list(truth.values())) - 1.0)
    # A point by itself is off by 0.067 in the median.
    assert np.median(errors) < 0.03
    places = scattered(TUNED_POINTS, noise_ratio=0.0)
    bent = {
        place: s * (1.0 + 0.5 * math.tanh(math.log2(place[0]) - 8)) for place, s in places.items()
    }
    seconds, _ = fit(GEMM, bent).predict(np.array(list(bent), dtype=np.float64))
    assert seconds == pytest.approx(list(bent.values()), rel=1e-6)


def test_rows_that_end_within_a_vector_cost_more_with_enough_points() -> None:
    rng = np.random.default_rng(0)
    series = Series("memory_bound", "swiglu", "fp32", "forward")

    def odd_s(rows: int, width: int) -> float:
        return 1e-6 + rows * (1e-8 + 1e-10 * width + 2e-9 * (width % 16))

    sizes = [(int(r), int(w)) for r, w in np.exp(rng.uniform(5.0, 7.0, (60, 2))).round()]
    curve = fit(series, {place: odd_s(*place) for place in sizes[:40]})
    seconds, _ = curve.predict(np.array(sizes[40:], dtype=np.float64))
    assert seconds == pytest.approx([odd_s(*place) for place in sizes[40:]], rel=1e-3)


def test_one_disturbed_point_gives_no_column_a_weight_of_its_own() -> None:
    series = Series("memory_bound", "rms_norm", "fp32", "forward")
    full: dict[tuple[int, ...], float] = {
        (rows, width): 1e-9 * rows * width for rows in (64, 512, 4096) for width in WIDTHS
    }
    # The only row that ends within a vector was measured while the machine was slow.
    single_curve = fit(series, full | {(300, 1001): 4e-9 * 300 * 1001})
    seconds, _ = single_curve.predict(np.array([[5000.0, 77.0]]))
    assert seconds[0] == pytest.approx(1e-9 * 5000 * 77, rel=0.35)
    # Three that agree are believed.
    odd = {
        (rows, width): ragged_s(rows, width) for rows, width in ((300, 1001), (2000, 77), (90, 205))
    }
    seconds, _ = fit(series, full | odd).predict(np.array([[1500.0, 333.0]]))
    assert seconds[0] == pytest.approx(ragged_s(1500, 333), rel=0.05)


def test_a_single_point_scales_by_its_work_and_none_is_refused() -> None:
    curve = fit(GEMM, {(1024, 1024, 1024): 0.01})
    seconds, _ = curve.predict(np.array([[1024.0, 1024.0, 1024.0], [2048.0, 1024.0, 1024.0]]))
    assert seconds[0] == pytest.approx(0.01)
    assert 0.01 <= seconds[1] <= 0.02 * (1 + 1e-9)
    with pytest.raises(ValueError, match="no measured point"):
        fit(GEMM, {})


def test_links_and_skews_are_curves_inside_a_group() -> None:
    curve = fit(SENT, {(1024, 2, 1, 2): 1e-4, (4096, 2, 1, 2): 4e-4, (8192, 2, 1, 2): 5e-4})
    queries = np.array([[1024, 2, 1, 2], [2048, 2, 1, 2], [16384, 2, 1, 2], [10, 2, 1, 2]])
    seconds, extrapolated = curve.predict(queries.astype(np.float64))
    # half way in log space; twice the bytes beyond the end; the latency below the start
    assert seconds == pytest.approx([1e-4, 2e-4, 1e-3, 1e-4])
    assert extrapolated.tolist() == [False, False, True, True]
    skew = Series("rendezvous", "", "", "")
    curve = fit(skew, {(250, 2, 1, 4): 1e-5, (1000, 2, 1, 4): 4e-5, (1000, 4, 1, 4): 9e-5})
    queries = np.array([[250.0, 2, 1, 4], [500.0, 2, 1, 4], [1000.0, 4, 1, 4], [0.0, 2, 1, 4]])
    seconds, _ = curve.predict(queries)
    # Half way in log space; a microsecond of work, the least there is, loses the root of that.
    assert seconds == pytest.approx([1e-5, 2e-5, 9e-5, 1e-5 / 250**0.5])


@each_row("lost_s", [{1000: 2e-3, 4000: 3e-3}, {4000: 3e-3}, {1000: 5e-3, 4000: 3e-3}])
def test_arrival_skew_grows_with_the_root_of_the_work(lost_s: dict[int, float]) -> None:
    curve = fit(
        Series("rendezvous", "", "", ""),
        {(work_us, 2, 1, 2): seconds for work_us, seconds in lost_s.items()},
    )
    seconds, extrapolated = curve.predict(np.array([[16000.0, 2.0, 1.0, 2.0]]))
    # Four times the longest work.
    assert seconds[0] == pytest.approx(2.0 * 3e-3)
    assert extrapolated[0]


def test_calls_cost_their_mean_without_pauses_of_the_machine() -> None:
    # Median 2; 30 is beyond three medians, 5 is skew: (1 + 2 + 2 + 5) / 4.
    curves = fit_curves(fake_profile([gemm_row(64, 1.0, 2.0, 2.0, 5.0, 30.0)]))
    assert curves[GEMM].predict(np.array([[64.0, 256.0, 256.0]]))[0][0] == pytest.approx(2.5)


def test_groups_do_not_mix() -> None:
    curve = fit(
        SENT,
        {(1024, 2, 1, 4): 1e-4, (1024, 2, 2, 4): 7e-4, (1024, 4, 1, 4): 9e-4},
    )
    queries = np.array([[1024.0, 2.0, 2.0, 4.0], [1024.0, 8.0, 1.0, 8.0]])
    seconds, extrapolated = curve.predict(queries)
    assert seconds[0] == pytest.approx(7e-4)
    assert extrapolated.tolist() == [False, True]
    assert math.isfinite(seconds[1])


def test_the_slowest_rank_counts_and_failures_do_not() -> None:
    failed = Measurement(case=gemm_case(8192), status=MeasurementStatus.FAILED, error="no")
    rows = [gemm_row(64, 1.0, 2.0, 3.0), gemm_row(64, 4.0, 4.0, 4.0, rank=1), failed]
    curves = fit_curves(fake_profile(rows))
    assert list(curves) == [GEMM]
    queries = np.array([[64.0, 256.0, 256.0], [8192.0, 256.0, 256.0]])
    seconds, extrapolated = curves[GEMM].predict(queries)
    assert seconds[0] == pytest.approx(4.0)
    assert extrapolated.tolist() == [False, True]


def test_axes_of_zero_have_a_time_too() -> None:
    case = Case(operation="copy", kind="device", axes={"bytes": 0})
    rows = [
        Measurement(case=case, times_s=(1e-6,)),
        Measurement(case=case.model_copy(update={"axes": {"bytes": 4096}}), times_s=(2e-6,)),
    ]
    (curve,) = fit_curves(fake_profile(rows)).values()
    assert curve.predict(np.array([[0.0]]))[0][0] == pytest.approx(1e-6)


def many_points() -> dict[tuple[int, ...], float]:
    """2,744 products whose times swing by a third around the physical law."""
    sizes = [2**e for e in range(4, 18)]
    return {
        (m, n, k): model_s(m, n, k) * (1.0 + 0.3 * math.sin(math.log2(m) + math.log2(n * k) / 2))
        for m in sizes
        for n in sizes
        for k in sizes
    }


def test_large_tables_are_exact_at_their_points_and_predict_between_them() -> None:
    points = many_points()
    curve = fit(GEMM, points)
    assert isinstance(curve, NeighbourCurve)
    assert len(curve.octaves_NA) == len(points) > MAX_POINTS
    queries = list(points)[::131]
    seconds, extrapolated = curve.predict(np.array(queries, dtype=np.float64))
    assert seconds == pytest.approx([points[place] for place in queries], rel=1e-6)
    assert not extrapolated.any()
    held_out = list(points)[::97]
    curve = fit(GEMM, {place: s for place, s in points.items() if place not in set(held_out)})
    seconds, extrapolated = curve.predict(np.array(held_out, dtype=np.float64))
    truth = np.array([points[place] for place in held_out])
    error = np.abs(seconds / truth - 1.0)[~extrapolated]
    # The swing itself is 0.3 at its crest, 0.21 in its median.
    assert np.median(error) < 0.06
    assert curve.predict(np.array([[2.0**30, 64.0, 64.0]]))[1].all()


def test_sizes_whose_logarithms_are_one_number_share_a_time() -> None:
    # Two batches that differ by one in 10^18, as a damaged profile holds them.
    rows: dict[tuple[int, ...], float] = {(8, 64, 64): 1e-5}
    rows |= {(10**18 + more, 64, 64): 1.0 + more for more in (0, 1)}
    seconds, _ = fit(GEMM, rows).predict(np.array([[1e18, 64.0, 64.0], [8.0, 64.0, 64.0]]))
    assert seconds == pytest.approx([math.sqrt(2.0), 1e-5], rel=1e-3)
