"""Mean times of calls that are now and then late, against machines whose truth is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from profilers.stalls import LATEST_S, seconds_with_stalls
from tests.rows import each_row

QUIET_S = np.array([2e-4, 2.5e-4, 3e-4, 5e-4, 1e-3, 4e-3, 16e-3, 64e-3])
LATE_S = 4e-3
NOISE_RATIO = 0.05


def repeats(rng: np.random.Generator, *, count: int, late_ratio: float) -> list[list[float]]:
    """Times that scatter upwards, and now and then wait."""
    return [
        (
            quiet_s * np.exp(NOISE_RATIO * np.abs(rng.standard_normal(count)))
            + LATE_S * (rng.random(count) < late_ratio)
        ).tolist()
        for quiet_s in QUIET_S
    ]


def errors(*, count: int, late_ratio: float, own_means: bool) -> NDArray[np.float64]:
    """Root mean square error of every size, over many machines."""
    rng = np.random.default_rng(0)
    noise = np.exp(NOISE_RATIO * np.abs(np.random.default_rng(1).standard_normal(10**5))).mean()
    truth_S = QUIET_S * noise + LATE_S * late_ratio
    found = []
    for _ in range(200):
        seen = repeats(rng, count=count, late_ratio=late_ratio)
        one = [np.mean(times) for times in seen] if own_means else seconds_with_stalls(seen)
        found.append(np.asarray(one) / truth_S - 1.0)
    root: NDArray[np.float64] = np.sqrt(np.mean(np.square(found), axis=0))
    return root


@each_row("count", [5, 20])
def test_short_calls_are_known_better_from_all_sizes_than_from_their_own_repeats(
    count: int,
) -> None:
    shared, own = (errors(count=count, late_ratio=0.15, own_means=flag) for flag in (False, True))
    assert np.all(shared[:3] < 0.70 * own[:3])
    assert np.all(shared <= 1.05 * own + 1e-3)


@each_row("late_ratio", [0.05, 0.3, 0.6])
def test_the_mean_is_right_however_often_calls_are_late(late_ratio: float) -> None:
    rng = np.random.default_rng(2)
    found = [seconds_with_stalls(repeats(rng, count=30, late_ratio=late_ratio)) for _ in range(100)]
    assert np.mean(found, axis=0) == pytest.approx(QUIET_S * 1.04 + LATE_S * late_ratio, rel=0.08)


def test_own_repeats_count_where_nothing_is_late_or_many_are_known() -> None:
    seen = repeats(np.random.default_rng(0), count=10, late_ratio=0.0)
    assert seconds_with_stalls(seen) == pytest.approx([np.mean(s) for s in seen], rel=0.02)
    rng = np.random.default_rng(0)
    never, often = np.full(1000, 2e-4), 2e-4 + LATE_S * (rng.random(1000) < 0.5)
    found = seconds_with_stalls([never.tolist(), often.tolist()])
    assert found == pytest.approx([2e-4, often.mean()], rel=0.25)
    assert seconds_with_stalls([[1e-3], [5e-3]]) == pytest.approx([1e-3, 5e-3])
    assert seconds_with_stalls([[0.0]])[0] > 0.0


@each_row("noise_ratio", [0.02, 0.3])
def test_noise_in_proportion_to_the_time_is_not_shared(noise_ratio: float) -> None:
    rng = np.random.default_rng(0)
    sizes_s = np.geomspace(1e-5, 7e-3, 10)
    found = [
        seconds_with_stalls(
            [(s * np.exp(noise_ratio * rng.standard_normal(10))).tolist() for s in sizes_s]
        )
        for _ in range(200)
    ]
    truth_S = sizes_s * np.exp(0.5 * noise_ratio**2)
    assert np.mean(found, axis=0) == pytest.approx(truth_S, rel=0.05)


@each_row("pause_s", [0.1, 2.0])
@each_row("at", [1, -1])
@each_row(("count", "most"), [(5, 2.5), (10, 2.3), (40, 1.6)])
def test_a_pause_of_the_whole_machine_is_no_stall(
    count: int, most: float, at: int, pause_s: float
) -> None:
    ratios = []
    for seed in range(20):
        seen = repeats(np.random.default_rng(seed), count=count, late_ratio=0.0)
        usual = seconds_with_stalls(seen)
        seen[at][3] += pause_s
        ratios.append(seconds_with_stalls(seen) / usual)
    ratios_S = np.mean(ratios, axis=0)
    assert np.all(ratios_S < most)
    # A mean of the repeats alone would be.
    assert 1.0 + pause_s / count / QUIET_S[1] > 10.0
    # What happens to a long call says nothing of short ones.
    if at == -1:
        assert ratios_S[:-1] == pytest.approx(1.0, abs=0.01)


@each_row("pauses", [2, 4])
def test_of_more_pauses_than_one_in_a_hundred_each_counts_as_a_late_call(pauses: int) -> None:
    seen = repeats(np.random.default_rng(0), count=10, late_ratio=0.0)
    usual_S = seconds_with_stalls(seen)
    for size in range(pauses):
        seen[size][3] += 1.0
    # Less the share that each size is drawn towards by the others.
    assert seconds_with_stalls(seen).mean() - usual_S.mean() < pauses * LATEST_S / 80 * 1.5


@given(
    st.lists(
        st.lists(st.floats(0.0, 10.0), min_size=1, max_size=8),
        min_size=1,
        max_size=6,
    )
)
def test_every_size_takes_at_least_what_its_quiet_repeats_do(seen: list[list[float]]) -> None:
    found = seconds_with_stalls(seen)
    assert np.all(np.isfinite(found))
    assert np.all(found > 0.0)
    assert np.all(found <= 2.0 * max(max(times) for times in seen) + 1e-9)
