"""What ranks that wait for each other take, from what each of them measured."""

import numpy as np
import pytest

from profilers.records import Case, Measurement, Status
from profilers.series import slowest_s
from profilers.testing import gemm_case, gemm_row

SIZES = tuple(range(16, 16 + 200))


def rows(*speeds: float, noise_ratio: float, seed: int = 0) -> list[Measurement]:
    """Equal work on every rank, each time off by so much."""
    rng = np.random.default_rng(seed)
    return [
        gemm_row(size, 1e-3 * speed * float(noise), rank=rank)
        for rank, speed in enumerate(speeds)
        for size, noise in zip(SIZES, np.exp(noise_ratio * rng.standard_normal(200)), strict=True)
    ]


def mean_s(found: list[Measurement]) -> float:
    (times,) = slowest_s(found).values()
    assert len(times) == len(SIZES)
    return float(np.mean(list(times.values())))


@pytest.mark.parametrize("ranks", [2, 8])
def test_equal_ranks_that_are_disturbed_in_turn_count_as_equal(ranks: int) -> None:
    noisy = rows(*[1.0] * ranks, noise_ratio=0.1)
    by_size = np.array([row.expected_s for row in noisy]).reshape(ranks, -1)
    # The slowest measurement of each size, which it replaces, lies beyond 5 and 14 %.
    assert by_size.max(axis=0).mean() > 1.05e-3
    assert mean_s(noisy) == pytest.approx(1e-3, rel=0.035)


def test_a_rank_that_is_slower_decides() -> None:
    assert mean_s(rows(1.0, 1.3, 1.0, 1.0, noise_ratio=0.05)) == pytest.approx(1.3e-3, rel=0.03)


def test_one_rank_alone_counts_as_it_is() -> None:
    alone = rows(1.0, noise_ratio=0.1)
    (times,) = slowest_s(alone).values()
    assert list(times.values()) == [row.expected_s for row in alone]


def test_of_a_collective_the_slowest_rank_counts() -> None:
    axes = {"bytes": 1024, "ranks": 2, "stride": 1, "world": 2}
    case = Case(operation="collective", kind="all_reduce", axes=axes)
    both = [
        Measurement(case=case, rank=rank, times_s=(seconds,), status=Status.OK)
        for rank, seconds in enumerate((1e-3, 3e-3))
    ]
    (times,) = slowest_s(both).values()
    assert list(times.values()) == [3e-3]


def test_a_size_that_one_rank_failed_at_takes_as_long_as_the_others_took() -> None:
    failed = Measurement(case=gemm_case(8), rank=1, status=Status.FAILED, error="out of memory")
    (times,) = slowest_s([*rows(1.0, 2.0, noise_ratio=0.0), gemm_row(8, 5e-4), failed]).values()
    by_rows = {place[0]: seconds for place, seconds in times.items()}
    assert by_rows.pop(8) == 5e-4
    assert list(by_rows.values()) == pytest.approx([2e-3] * len(SIZES))
