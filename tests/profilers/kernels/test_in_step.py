"""Ranks, here threads, that time a kernel in step: as often as each other, or not at all."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from profilers.kernels.autograd import Prepared
from profilers.kernels.suite import measure_kernel
from profilers.pace import Pace
from profilers.records import Measurement, MeasurementStatus
from profilers.team import AllReduceMax
from tests.patience import patient_s
from tests.profilers.testing import FakeClock, gemm_case
from tests.rows import each_row

RANKS = 2
"""A rank that waits for a word that nobody says breaks the barrier."""

Prepare = Callable[[FakeClock], Prepared]


def _all_reduce_max() -> AllReduceMax:
    sent: list[Sequence[float]] = []
    barrier = threading.Barrier(RANKS, timeout=patient_s(20.0))

    def all_reduce_max(values: Sequence[float]) -> Sequence[float]:
        sent.append(tuple(values))
        barrier.wait()
        largest = tuple(map(max, zip(*sent[-RANKS:], strict=True)))
        barrier.wait()
        return largest

    return all_reduce_max


def _measured(
    *prepare: Prepare, budget_s: float = 0.0, free_bytes: Sequence[int] = (2**30, 2**30)
) -> list[tuple[Measurement, ...]]:
    all_reduce_max = _all_reduce_max()

    def of(rank: int) -> tuple[Measurement, ...]:
        clock = FakeClock()
        return measure_kernel(
            gemm_case(4),
            prepare=lambda: prepare[rank](clock),
            clock=clock,
            budget_s=budget_s,
            free_bytes=free_bytes[rank],
            rank=rank,
            pace=Pace(all_reduce_max=all_reduce_max),
        )

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(of, range(RANKS)))


def _running(*run_s: float) -> Prepare:
    """A kernel whose forward takes these times in turn, and whose backward takes the first."""

    def prepare(clock: FakeClock) -> Prepared:
        turns = iter(range(10**6))
        return Prepared(
            forward=lambda: clock.advance(run_s[next(turns) % len(run_s)]),
            backward=lambda: lambda: clock.advance(run_s[0]),
        )

    return prepare


def _failing(_clock: FakeClock) -> Prepared:
    raise RuntimeError("no kernel for this shape")


def _failing_backward(clock: FakeClock) -> Prepared:
    def backward() -> Callable[[], object]:
        raise MemoryError("not enough")

    return Prepared(forward=lambda: clock.advance(1e-3), backward=backward)


def test_a_steady_rank_repeats_as_often_as_its_noisy_neighbour() -> None:
    steady, noisy = _measured(_running(1e-3), _running(1e-3, 4e-3, 9e-3), budget_s=1.0)
    assert len(steady[0].times_s) == len(noisy[0].times_s) > 8
    assert steady[0].times_s == pytest.approx([1e-3] * len(steady[0].times_s))
    assert max(noisy[0].times_s) == pytest.approx(9e-3)


def test_a_fast_rank_runs_as_often_in_a_repeat_as_its_slow_neighbour() -> None:
    runs = [0, 0]

    def counting(rank: int, run_s: float) -> Prepare:
        def prepare(clock: FakeClock) -> Prepared:
            def forward() -> None:
                runs[rank] += 1
                clock.advance(run_s)

            return Prepared(forward=forward, backward=lambda: lambda: clock.advance(run_s))

        return prepare

    fast, slow = _measured(counting(0, 2**-19), counting(1, 2**-16))
    assert runs[0] == runs[1]
    assert fast[0].median_s == pytest.approx(2**-19)
    assert slow[0].median_s == pytest.approx(2**-16)


@each_row("which", [0, 1])
def test_what_one_rank_cannot_prepare_no_rank_measures(which: int) -> None:
    ranks = [_running(1e-3), _running(1e-3)]
    ranks[which] = _failing
    rows = _measured(*ranks)
    assert {row.status for row in rows[which]} == {MeasurementStatus.FAILED}
    assert rows[which][0].error == "RuntimeError: no kernel for this shape"
    assert [row.error for row in rows[1 - which]] == ["a peer failed", "a peer failed"]


def test_a_backward_that_fails_on_one_rank_leaves_the_forward_on_both() -> None:
    whole, broken = _measured(_running(1e-3), _failing_backward)
    assert [row.status for row in whole] == [MeasurementStatus.OK, MeasurementStatus.FAILED]
    assert [row.status for row in broken] == [MeasurementStatus.OK, MeasurementStatus.OUT_OF_MEMORY]


def test_ranks_that_fail_or_lack_memory_do_so_together() -> None:
    rows = _measured(_failing, _failing)
    assert {row.error for of_rank in rows for row in of_rank} == {
        "RuntimeError: no kernel for this shape"
    }
    rows = _measured(_running(1e-3), _running(1e-3), free_bytes=(2**30, 16))
    assert {row.status for of_rank in rows for row in of_rank} == {MeasurementStatus.OUT_OF_MEMORY}
