"""What a sentinel takes out of repeats, and which core it goes to."""

import itertools
import math
from collections.abc import Callable

import pytest

from profilers.noise.cores import Cores
from profilers.noise.sentinel import CHECK_CORE_EVERY_S, CORRELATION_S, EXPONENTS, SAMPLES, Sentinel
from tests.profilers.testing import FakeClock

WORK_S = 1e-3


class Unpinned(Cores):
    """Cores that nothing is pinned to."""

    def __init__(self, count: int) -> None:
        super().__init__(range(count))

    def enter(self, number: int) -> None:
        self._current = number


class Machine:
    """One whose work takes as long as a function of the time says, on each core."""

    def __init__(self, *factors: Callable[[float], float]) -> None:
        self.clock = FakeClock()
        self.cores = Unpinned(len(factors))
        self._factors = factors

    def work(self) -> None:
        self.clock.advance(WORK_S * self._factors[self.cores.current](self.clock.now_s()))

    def sentinel(self) -> Sentinel:
        return Sentinel(work=self.work, clock=self.clock, cores=self.cores)


def spell(start_s: float, end_s: float) -> Callable[[float], float]:
    """Half as slow again between two times."""
    return lambda now_s: 1.5 if start_s <= now_s < end_s else 1.0


def slowdown(machine: Machine, sentinel: Sentinel, *, lasts_s: float) -> float:
    """What is taken out of something that lasts so long, beginning now."""
    before_s = sentinel.read_s()
    machine.clock.advance(lasts_s)
    return sentinel.slowdown(before_s, sentinel.read_s(), lasted_s=lasts_s)


def test_on_an_undisturbed_machine_nothing_is_taken_out() -> None:
    machine = Machine(lambda _now_s: 1.0)
    sentinel = machine.sentinel()
    sentinel.begin_case("gemm")
    assert (sentinel.session_undisturbed_s, sentinel.session_slowdown) == (0.0, 1.0)
    assert slowdown(machine, sentinel, lasts_s=0.01) == pytest.approx(1.0)
    assert sentinel.session_undisturbed_s == pytest.approx(WORK_S)
    assert sentinel.session_slowdown == pytest.approx(1.0)


def test_a_disturbance_is_taken_out_and_less_of_it_from_longer_repeats() -> None:
    machine = Machine(spell(2.0, 1e9))
    sentinel = machine.sentinel()
    sentinel.calibrate(seconds=2.0)
    assert slowdown(machine, sentinel, lasts_s=1e-4) == pytest.approx(1.5, rel=0.01)
    # It has just begun, and nobody saw whether it lasted.
    taken = [sentinel.slowdown(1.5 * WORK_S, 1.5 * WORK_S, lasted_s=T) for T in (1e-3, 1e-2, 1e-1)]
    assert 1.5 > taken[0] > taken[1] > taken[2] > 1.5**0.5


def test_the_correction_of_a_repeat_by_hand() -> None:
    machine = Machine(lambda _now_s: 1.0)
    sentinel = machine.sentinel()
    sentinel.calibrate(seconds=2.0)
    # Nothing usual: half lasts, and of the other half tanh(1) is known after two correlation times.
    taken = sentinel.slowdown(1.5 * WORK_S, 1.5 * WORK_S, lasted_s=2.0 * CORRELATION_S)
    assert taken == pytest.approx(1.5 ** (0.5 + 0.5 * math.tanh(1.0)))


def test_memory_bound_operations_slow_down_more_than_the_gemms() -> None:
    machine = Machine(lambda _now_s: 1.0)
    sentinel = machine.sentinel()
    sentinel.calibrate(seconds=2.0)
    taken = {}
    for operation in ("memory_bound", "gemm"):
        sentinel.begin_case(operation)
        slow_s = 1.5 * WORK_S
        taken[operation] = sentinel.slowdown(slow_s, slow_s, lasted_s=1e-6)
    assert taken == pytest.approx({"memory_bound": 1.5 ** EXPONENTS["memory_bound"], "gemm": 1.5})


def test_between_fast_readings_a_long_repeat_was_as_slow_as_the_average() -> None:
    # Slow but for moments.
    machine = Machine(lambda now_s: 1.0 if now_s % 0.5 < 0.1 else 1.5)
    sentinel = machine.sentinel()
    sentinel.calibrate(seconds=5.05)
    long, short = (sentinel.slowdown(WORK_S, WORK_S, lasted_s=T) for T in (1.0, 1e-5))
    assert short == pytest.approx(1.0, abs=0.01)
    # Half of what disturbs outlasts any repeat, and was not seen; the other half is usual.
    assert long == pytest.approx(1.5 ** (0.5 * 0.8), rel=0.05)


def test_one_reading_after_a_long_time_is_not_the_average() -> None:
    machine = Machine(spell(10.0, 1e9))
    sentinel = machine.sentinel()
    sentinel.calibrate(seconds=2.0)
    machine.clock.advance(20.0)
    sentinel.read_s()
    assert sentinel.slowdown(WORK_S, WORK_S, lasted_s=1.0) == pytest.approx(1.0, abs=0.01)


def test_the_usual_scatter_of_readings_is_not_taken_out() -> None:
    turns = itertools.cycle((1.0, 1.01, 1.02, 1.005, 1.015))
    machine = Machine(lambda _now_s: next(turns))
    sentinel = machine.sentinel()
    sentinel.calibrate(seconds=1.0)
    assert slowdown(machine, sentinel, lasts_s=1e-3) == 1.0


def test_readings_of_another_session_do_not_count() -> None:
    machine = Machine(lambda _now_s: 1.0)
    sentinel = machine.sentinel()
    sentinel.begin_case("gemm")
    slowdown(machine, sentinel, lasts_s=1e-3)
    assert sentinel.session_undisturbed_s > 0.0
    sentinel.begin_case("gemm")
    sentinel.read_s()
    # Nothing was taken out of what a visit to storage measures.
    assert (sentinel.session_undisturbed_s, sentinel.session_slowdown) == (0.0, 1.0)


def test_the_number_of_readings_is_limited_and_old_ones_are_thinned_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("profilers.noise.sentinel.MAX_READINGS", 64)
    machine = Machine(lambda now_s: 0.8 if now_s < 0.1 else 1.0)
    sentinel = machine.sentinel()
    sentinel.calibrate(seconds=0.15)
    assert slowdown(machine, sentinel, lasts_s=1e-3) > 1.2
    sentinel.calibrate(seconds=5.0)
    assert slowdown(machine, sentinel, lasts_s=1e-3) == pytest.approx(1.0, abs=1e-3)


def test_a_machine_that_stays_slow_keeps_its_undisturbed_time() -> None:
    machine = Machine(spell(3.0, 1e9))
    sentinel = machine.sentinel()
    sentinel.calibrate(seconds=3.0)
    while machine.clock.now_s() < 30.0:
        sentinel.read_s()
        machine.clock.advance(0.05)
    assert slowdown(machine, sentinel, lasts_s=1e-3) == pytest.approx(1.5, rel=0.01)


def test_a_short_boost_at_the_start_is_not_the_undisturbed_speed() -> None:
    machine = Machine(lambda now_s: 0.8 if now_s < 0.05 else 1.0)
    sentinel = machine.sentinel()
    sentinel.calibrate(seconds=5.0)
    assert slowdown(machine, sentinel, lasts_s=1e-3) == pytest.approx(1.0, abs=1e-3)


def test_a_core_that_is_slow_from_the_start_or_for_good_is_left() -> None:
    always = Machine(lambda _now_s: 1.5, lambda _now_s: 1.0)
    sentinel = always.sentinel()
    sentinel.calibrate(seconds=0.0)
    assert always.cores.current == 1
    later = Machine(spell(2.0, 1e9), lambda _now_s: 1.01)
    sentinel = later.sentinel()
    sentinel.calibrate(seconds=1.5)
    assert later.cores.current == 0
    while later.clock.now_s() < 2.0 + 1.1 * CHECK_CORE_EVERY_S:
        sentinel.begin_case("gemm")
        later.clock.advance(0.05)
    assert later.cores.current == 1


def test_with_one_core_no_other_is_read() -> None:
    machine = Machine(lambda _now_s: 1.0)
    sentinel = machine.sentinel()
    machine.clock.advance(2.0 * CHECK_CORE_EVERY_S)
    sentinel.begin_case("gemm")
    assert machine.clock.now_s() == 2.0 * CHECK_CORE_EVERY_S


def test_a_single_interrupt_is_no_state_of_the_machine() -> None:
    runs = iter(range(10**6))
    machine = Machine(lambda _now_s: 50.0 if next(runs) % (1 + SAMPLES) == 2 else 1.0)
    assert machine.sentinel().read_s() == pytest.approx(WORK_S)
