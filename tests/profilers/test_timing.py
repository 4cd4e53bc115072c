import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.pace import BY_ITSELF, Pace
from profilers.timing import (
    LONG_S,
    PeerFailedError,
    loops_per_repeat,
    measure,
    measure_fresh,
    spread_of_median,
)
from tests.profilers.testing import FakeClock
from tests.rows import each_row


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def task(clock: FakeClock, *durations_s: float) -> Callable[[], None]:
    turns: Iterator[float] = itertools.cycle(durations_s)
    return lambda: clock.advance(next(turns))


def test_steady_runs_take_the_fewest_repeats_and_their_preparations_do_not_count(
    clock: FakeClock,
) -> None:
    times_s = measure(task(clock, 0.001), clock=clock, budget_s=10.0)
    assert times_s == pytest.approx((0.001,) * 5)
    assert measure(lambda: None, clock=clock, budget_s=0.0) == (0.0,) * 5

    def fresh() -> Callable[[], None]:
        clock.advance(5.0)
        return lambda: clock.advance(0.25)

    assert measure_fresh(fresh, clock=clock, budget_s=0.0) == (0.25,) * 5


def test_a_noisy_run_is_repeated_within_its_budget_and_the_most_repeats(clock: FakeClock) -> None:
    times_s = measure(task(clock, 0.1, 0.3, 0.2), clock=clock, budget_s=4.0)
    assert 10 <= len(times_s) <= 25
    assert clock.now_s() <= 4.0 + 2.0
    times_s = measure(task(clock, 0.001, 0.003), clock=clock, budget_s=1e9, max_repeats=12)
    assert len(times_s) == 12


def test_repeats_are_warm_and_settled(clock: FakeClock) -> None:
    durations_s = iter([9.0, 1.0, 1.0, *[1.0] * 5])
    times_s = measure(lambda: clock.advance(next(durations_s)), clock=clock, budget_s=1.0)
    assert times_s == (1.0,) * 5
    steady = task(clock, 0.001)
    one, other = (
        measure(steady, clock=clock, budget_s=1.0, min_repeats=4, settled_repeats=settled)
        for settled in (0, 8)
    )
    assert (len(one), len(other)) == (4, 8)


@each_row(
    ("run_s", "pace", "loops"), [(2**-19, BY_ITSELF, 525), (2**-10, Pace(repeat_s=2**-4), 64)]
)
def test_a_run_is_looped_as_long_as_a_repeat_lasts(
    clock: FakeClock, run_s: float, pace: Pace, loops: int
) -> None:
    count = itertools.count()

    def run() -> None:
        next(count)
        clock.advance(run_s)

    assert measure(run, clock=clock, budget_s=1.0, pace=pace) == pytest.approx((run_s,) * 5)
    # 2 warm-ups, then 5 repeats; by itself one lasts 1 ms / 1.907 us = 524.3 runs, so 525.
    assert next(count) == 2 + 5 * loops


def test_rare_pauses_count_where_runs_take_turns() -> None:
    # Every tenth run waits for somebody else's turn of ten runs: the average is 1.9 times a run.
    durations_s = [0.001] * 9 + [0.01]
    isolated, in_turns = (
        sorted(
            measure(
                task(clock, *durations_s),
                clock=clock,
                budget_s=1.0,
                pace=Pace(repeat_s=repeat_s),
            )
        )
        for clock, repeat_s in ((FakeClock(), 0.0), (FakeClock(), 0.1))
    )
    assert isolated[len(isolated) // 2] == pytest.approx(0.001)
    assert in_turns[len(in_turns) // 2] == pytest.approx(0.0019, rel=0.1)


def test_only_so_many_prepared_runs_are_alive_at_once(clock: FakeClock) -> None:
    held: list[int] = []

    def fresh() -> Callable[[], None]:
        held.append(1)
        return lambda: clock.advance(0.001)

    measure_fresh(fresh, clock=clock, budget_s=1.0, pace=Pace(repeat_s=0.1), max_loops=7)
    assert len(held) == 2 + 5 * 7


def test_long_preparations_leave_room_for_fewer_runs_in_a_repeat(clock: FakeClock) -> None:
    held: list[int] = []

    def fresh() -> Callable[[], None]:
        held.append(1)
        clock.advance(0.009)
        return lambda: clock.advance(0.001)

    times_s = measure_fresh(fresh, clock=clock, budget_s=1.0, pace=Pace(repeat_s=0.1))
    assert times_s == pytest.approx((0.001,) * 5)
    # A second for five repeats of runs that last 10 ms with what prepares them: 20 of each.
    assert len(held) == pytest.approx(2 + 5 * 20, abs=5)


def test_a_long_run_is_warm_at_once_and_needs_few_repeats(clock: FakeClock) -> None:
    count = itertools.count()

    def run() -> None:
        next(count)
        clock.advance(2.0 * LONG_S)

    assert len(measure(run, clock=clock, budget_s=0.0, min_repeats=4, long_repeats=3)) == 3
    assert next(count) == 1 + 3
    # Where a repeat has to last, its length has to be known.
    assert len(measure(run, clock=clock, budget_s=0.0, min_repeats=4, pace=Pace(repeat_s=1.0))) == 4


def test_loops_and_spread_by_hand() -> None:
    assert loops_per_repeat(50e-6) == 1
    assert loops_per_repeat(40e-6) == 25
    assert loops_per_repeat(0.0) == 1000
    # quartiles of 1..5 are 2 and 4: 1.2533 * (2 / 1.349) / sqrt(5) / 3
    assert spread_of_median([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(0.27700, rel=1e-4)
    assert spread_of_median([1.0]) == math.inf


@settings(deadline=None, max_examples=50)
@given(
    durations_s=st.lists(st.floats(1e-7, 10.0), min_size=1, max_size=7),
    budget_s=st.floats(0.0, 100.0),
)
def test_every_repeat_lies_within_the_durations(durations_s: list[float], budget_s: float) -> None:
    clock = FakeClock()
    times_s = measure(task(clock, *durations_s), clock=clock, budget_s=budget_s)
    assert 5 <= len(times_s) <= 50
    slack = 1e-6
    assert min(durations_s) * (1 - slack) - 1e-9 <= min(times_s)
    assert max(times_s) <= max(durations_s) * (1 + slack) + 1e-9


@each_row("run_s", [20e-6, 60e-6, 300e-6])
def test_the_effect_of_a_message_on_the_caches_hardly_counts(
    run_s: float, clock: FakeClock
) -> None:
    is_cold = [True]

    def all_reduce_max(own: Sequence[float]) -> Sequence[float]:
        is_cold[0] = True
        return own

    def run() -> None:
        clock.advance(run_s + (40e-6 if is_cold[0] else 0.0))
        is_cold[0] = False

    times_s = measure(run, clock=clock, budget_s=0.0, pace=Pace(all_reduce_max=all_reduce_max))
    assert times_s == pytest.approx((run_s,) * 5, rel=0.05)


def test_an_interrupt_while_the_loop_is_sized_makes_it_no_shorter(clock: FakeClock) -> None:
    runs = itertools.count()

    def run() -> None:
        clock.advance(2**-12 + (4e-3 if next(runs) == 3 else 0.0))

    measure(run, clock=clock, budget_s=0.0, pace=Pace(all_reduce_max=lambda own: own))
    # 1 ms / 244 us = 4.1
    assert next(runs) == 2 + 5 + 5 * 5


PAGE_S = 2e-5


def growing(clock: FakeClock, *pages: int) -> Callable[[], None]:
    """A run of 1 ms, and 20 us for each page that it meets for the first time, as told in turn."""
    turns = itertools.cycle(pages)

    def run() -> None:
        mapped = next(turns)
        clock.pages += mapped
        clock.advance(1e-3 + PAGE_S * mapped)

    return run


def test_repeats_that_waited_for_pages_are_left_out(clock: FakeClock) -> None:
    # Two warm-ups come first; a page is no matter.
    times_s = measure(growing(clock, 0, 0, 4096, 1, 0, 8192, 0), clock=clock, budget_s=0.0)
    assert times_s == pytest.approx((1e-3,) * 3, rel=0.03)


def test_if_all_but_one_waited_for_pages_twice_as_many_are_taken(clock: FakeClock) -> None:
    run = growing(clock, 0, 0, 4096, 0, 4096, 4096, 4096, 4096, 4096, 0)
    assert measure(run, clock=clock, budget_s=0.0) == pytest.approx((1e-3,) * 4)
    # One repeat would not tell how much they differ, so all count.
    one = measure(growing(clock, 0, 0, 0, *[4096] * 9), clock=clock, budget_s=0.0)
    assert sorted(one) == pytest.approx([1e-3] + [1e-3 + 4096 * PAGE_S] * 9)


def test_a_run_that_maps_pages_every_time_settles_all_the_same(clock: FakeClock) -> None:
    times_s = measure(growing(clock, 4096), clock=clock, budget_s=1e9)
    assert times_s == pytest.approx((1e-3 + 4096 * PAGE_S,) * 10)


def test_repeats_that_waited_for_pages_settle_nothing(clock: FakeClock) -> None:
    pages = [0, 0, *[4096] * 6, *[0] * 99]
    times_s = measure(growing(clock, *pages), clock=clock, budget_s=1e9, settled_repeats=8)
    assert times_s == pytest.approx((1e-3,) * len(times_s))
    assert len(times_s) >= 8


def test_a_first_run_that_waited_for_pages_is_not_taken_for_a_long_one(clock: FakeClock) -> None:
    pages = [4096, *[0] * 99]
    times_s = measure(
        growing(clock, *pages), clock=clock, budget_s=0.0, min_repeats=4, long_repeats=2
    )
    assert len(times_s) == 4


def test_a_failing_peer_ends_a_measurement_in_lockstep(clock: FakeClock) -> None:
    with pytest.raises(PeerFailedError):
        measure(
            task(clock, 0.001),
            clock=clock,
            budget_s=1.0,
            pace=Pace(all_reduce_max=lambda own: (own[0], math.inf)),
        )


def test_a_device_is_held_twice_as_long_as_the_host_takes_to_queue_a_repeat(
    clock: FakeClock,
) -> None:
    times_s = measure(task(clock, 0.002), clock=clock, budget_s=10.0)
    first, *held_s = clock.held_s
    assert first == 0.0
    assert held_s == pytest.approx([0.004] * (len(times_s) + 1))

    def run() -> None:
        clock.advance(0.002 + clock.held_s[-1])

    measure(run, clock=clock, budget_s=10.0)
    assert max(clock.held_s) == pytest.approx(0.004)
