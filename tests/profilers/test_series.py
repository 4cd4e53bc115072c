"""What ranks that wait for each other take, from what each of them measured."""

import numpy as np
import pytest

from profilers.records import Case, Measurement, MeasurementStatus
from profilers.series import together_s
from tests.profilers.testing import gemm_case, gemm_row
from tests.rows import each_row

SIZES = tuple(range(16, 16 + 200))


def rows(*speeds: float, noise_ratio: float = 0.0) -> list[Measurement]:
    """Equal work, for which each rank takes `speeds` milliseconds; each time is off by so much."""
    rng = np.random.default_rng(0)
    noise = iter(np.exp(noise_ratio * rng.standard_normal(len(speeds) * len(SIZES))).tolist())
    return [
        gemm_row(size, 1e-3 * speed * next(noise), rank=rank)
        for rank, speed in enumerate(speeds)
        for size in SIZES
    ]


def times_of(found: list[Measurement]) -> dict[int, float]:
    (times,) = together_s(found).values()
    return {place[0]: seconds for place, seconds in times.items()}


@each_row("ranks", [2, 8])
def test_equal_ranks_that_are_disturbed_in_turn_count_as_equal(ranks: int) -> None:
    noisy = rows(*[1.0] * ranks, noise_ratio=0.1)
    by_size = np.array([row.expected_s for row in noisy]).reshape(ranks, -1)
    assert by_size.max(axis=0).mean() > 1.05e-3
    assert np.mean(list(times_of(noisy).values())) == pytest.approx(1e-3, rel=0.035)


@each_row("ranks", [2, 8, 32])
def test_a_size_that_nothing_disturbed_takes_what_every_rank_took(ranks: int) -> None:
    halved = np.random.default_rng(0).random((ranks, len(SIZES))) < 0.2
    halved[:, 7] = False
    found = [
        gemm_row(size, 2e-3 if halved[rank, at] else 1e-3, rank=rank)
        for rank in range(ranks)
        for at, size in enumerate(SIZES)
    ]
    assert times_of(found)[SIZES[7]] == pytest.approx(1e-3, rel=0.04)
    assert all(0.999e-3 <= seconds <= 2.001e-3 for seconds in times_of(found).values())


def test_a_slower_rank_decides_and_a_single_one_counts_as_it_is() -> None:
    found = times_of(rows(1.0, 1.3, 1.0, 1.0, noise_ratio=0.05))
    assert np.mean(list(found.values())) == pytest.approx(1.3e-3, rel=0.03)
    single = rows(1.0, noise_ratio=0.1)
    assert list(times_of(single).values()) == [row.expected_s for row in single]
    found = times_of([gemm_row(64, 1e-3), gemm_row(128, 3e-3, rank=1)])
    assert found == {64: 1e-3, 128: 3e-3}


@each_row("measured_by", [(0,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_a_size_that_some_ranks_failed_at_takes_what_the_slowest_would(
    measured_by: tuple[int, ...],
) -> None:
    speeds = (1.0, 1.0, 2.0)
    some = [gemm_row(8, 5e-4 * speeds[rank], rank=rank) for rank in measured_by]
    failed = [
        Measurement(
            case=gemm_case(8), rank=rank, status=MeasurementStatus.FAILED, error="out of memory"
        )
        for rank in {0, 1, 2} - set(measured_by)
    ]
    found = times_of([*rows(*speeds), *some, *failed])
    assert found.pop(8) == pytest.approx(1e-3)
    assert list(found.values()) == pytest.approx([2e-3] * len(SIZES))


@each_row(
    "case",
    [
        Case(
            operation="collective",
            kind="all_reduce",
            axes={"bytes": 1024, "ranks": 2, "stride": 1, "world": 2},
        ),
        Case(operation="storage", kind="write", axes={"bytes": 1024}),
    ],
)
def test_of_what_ranks_time_together_the_slowest_counts(case: Case) -> None:
    other = case.model_copy(update={"axes": case.axes | {"bytes": 2048}})
    found = [
        Measurement(case=one, rank=rank, times_s=(seconds,))
        for one, both in ((case, (1e-3, 3e-3)), (other, (4e-3, 2e-3)))
        for rank, seconds in enumerate(both)
    ]
    (times,) = together_s(found).values()
    assert list(times.values()) == [3e-3, 4e-3]


def collective(kind: str, size: int, *times_s: float, stride: int = 1) -> Measurement:
    axes = {"bytes": size, "ranks": 2, "stride": stride, "world": 4}
    return Measurement(case=Case(operation="collective", kind=kind, axes=axes), times_s=times_s)


def test_small_messages_of_one_kind_and_group_share_what_they_wait() -> None:
    # Of the repeats of 1 KiB none was late, of those of 2 KiB two.
    lucky, unlucky = (1e-4,) * 10, (1e-4,) * 8 + (4e-3,) * 2
    small = [collective("all_gather", 1024, *lucky), collective("all_gather", 2048, *unlucky)]
    others = [
        collective("reduce_scatter", 1024, *lucky),
        collective("all_gather", 1024, *lucky, stride=2),
    ]
    found = together_s([*small, *others])
    by_kind = {series.kind: times for series, times in found.items()}
    less, more = (by_kind["all_gather"][size, 2, 1, 4] for size in (1024, 2048))
    assert 3e-4 < less < more < 1e-4 + 0.2 * 3.9e-3
    assert less + more == pytest.approx(2 * (1e-4 + 0.1 * 3.9e-3), rel=0.05)
    assert by_kind["reduce_scatter"][1024, 2, 1, 4] == pytest.approx(1e-4)
    assert by_kind["all_gather"][1024, 2, 2, 4] == pytest.approx(1e-4)


def test_arrival_skew_is_the_mean_of_its_blocks_and_not_of_other_works() -> None:
    def skew(work_us: int, *times_s: float) -> Measurement:
        axes = {"work_us": work_us, "ranks": 2, "stride": 1, "world": 2}
        return Measurement(case=Case(operation="rendezvous", axes=axes), times_s=times_s)

    # Most blocks of the first lost nothing; what is rare and large is what a meeting loses.
    (found,) = together_s([skew(250, *[1e-6] * 6, 4e-4, 4e-4), skew(64000, *[2e-3] * 9)]).values()
    assert found[250, 2, 1, 2] == pytest.approx(1e-4, rel=0.02)
    assert found[64000, 2, 1, 2] == pytest.approx(2e-3)


def test_a_check_of_collectives_takes_the_mean_of_each_by_itself() -> None:
    rows_ = [collective("all_gather", 1024, 1e-4), collective("all_gather", 2048, 1e-4, 8e-3)]
    (found,) = together_s(rows_, shared=False).values()
    assert list(found.values()) == pytest.approx([1e-4, 4.05e-3])
