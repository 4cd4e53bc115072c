"""When repeats wait for the machine, and what counts as slow."""

from collections.abc import Callable

import pytest

from profilers.cores import Cores
from profilers.sentinel import MOST_WAITING_RATIO, TIMES, WINDOW_S, Sentinel
from profilers.testing import FakeClock

WORK_S = 1e-3


class Unpinned(Cores):
    """Cores that nothing is pinned to."""

    def __init__(self, count: int) -> None:
        super().__init__(range(count))

    def enter(self, number: int) -> None:
        self._at = number


class Machine:
    """One whose work takes as long as a function of the time says, on each core."""

    def __init__(self, *factors: Callable[[float], float]) -> None:
        self.clock = FakeClock()
        self.cores = Unpinned(len(factors))
        self._factors = factors

    def work(self) -> None:
        self.clock.advance(WORK_S * self._factors[self.cores.at](self.clock.now_s()))

    def sentinel(self) -> Sentinel:
        return Sentinel(work=self.work, clock=self.clock, cores=self.cores)


def spell(start_s: float, end_s: float) -> Callable[[float], float]:
    """Half as slow again between two times."""
    return lambda now_s: 1.5 if start_s <= now_s < end_s else 1.0


def waited(machine: Machine, *, visits: int, patience_s: float) -> float:
    """Seconds that so many visits of 30 ms each waited in all."""
    sentinel = machine.sentinel()
    waited_s = 0.0
    for _ in range(visits):
        sentinel.begin(patience_s=patience_s)
        before_s = machine.clock.now_s()
        sentinel.wait()
        waited_s += machine.clock.now_s() - before_s
        machine.clock.advance(0.03)
    return waited_s


def test_an_undisturbed_machine_is_not_waited_for() -> None:
    machine = Machine(lambda _now_s: 1.0)
    sentinel = machine.sentinel()
    sentinel.begin(patience_s=10.0)
    assert sentinel.wait() == pytest.approx(WORK_S)
    # One reading: the caches are filled first.
    assert machine.clock.now_s() == pytest.approx((1 + TIMES) * WORK_S)


def test_a_spell_is_waited_out() -> None:
    machine = Machine(spell(2.0, 2.5))
    sentinel = machine.sentinel()
    sentinel.look_around(seconds=2.0)
    sentinel.begin(patience_s=10.0)
    machine.clock.advance(0.05)
    assert sentinel.wait() == pytest.approx(WORK_S)
    assert 2.5 <= machine.clock.now_s() < 2.52


def test_a_spell_on_one_core_is_left_for_another_at_once() -> None:
    machine = Machine(spell(2.04, 1e9), lambda _now_s: 1.0)
    sentinel = machine.sentinel()
    sentinel.look_around(seconds=2.0)
    # Even without patience: looking at the other core takes no more than a reading.
    sentinel.begin(patience_s=0.0)
    machine.clock.advance(0.05)
    settled: list[int] = []
    for _ in range(2):
        assert sentinel.wait(lambda: settled.append(machine.cores.at)) == pytest.approx(WORK_S)
    assert machine.clock.now_s() < 2.05 + 6 * (1 + TIMES) * WORK_S
    assert settled == [1]
    assert machine.cores.at == 1


def test_back_on_the_core_where_a_wait_began_the_caches_are_as_they_were() -> None:
    machine = Machine(spell(2.04, 2.09), spell(2.04, 1e9))
    sentinel = machine.sentinel()
    sentinel.look_around(seconds=2.0)
    machine.clock.advance(0.05)
    sentinel.begin(patience_s=10.0)
    settled: list[int] = []
    assert sentinel.wait(lambda: settled.append(machine.cores.at)) == pytest.approx(WORK_S)
    assert machine.cores.at == 0
    assert not settled


def test_where_all_cores_stay_slow_a_wait_ends_on_the_least_slow_one() -> None:
    def slow(factor: float) -> Callable[[float], float]:
        return lambda now_s: factor if now_s >= 2.0 else 1.0

    machine = Machine(slow(1.7), slow(1.15), slow(1.7), slow(1.7))
    sentinel = machine.sentinel()
    sentinel.look_around(seconds=2.0)
    machine.clock.advance(0.05)
    for _ in range(5):
        sentinel.begin(patience_s=0.0)
        assert sentinel.wait() == pytest.approx(1.15 * WORK_S)
        assert machine.cores.at == 1


def test_looking_at_other_cores_does_not_count_as_waiting_in_vain() -> None:
    def slow(now_s: float) -> float:
        return 1.0 if now_s < 2.0 or (now_s > 6.0 and now_s % 2.0 > 0.3) else 1.5

    machine = Machine(slow, slow)
    sentinel = machine.sentinel()
    sentinel.look_around(seconds=2.0)
    beside = []
    while machine.clock.now_s() < 40.0:
        sentinel.begin(patience_s=0.5 if machine.clock.now_s() > 6.0 else 0.0)
        beside.append((machine.clock.now_s(), sentinel.is_slow(sentinel.wait())))
        machine.clock.advance(0.02)
    late = [is_slow for now_s, is_slow in beside if now_s > 8.0]
    assert sum(late) < 0.03 * len(late)


def test_a_core_that_is_slow_from_the_start_or_for_good_is_left() -> None:
    always = Machine(lambda _now_s: 1.5, lambda _now_s: 1.0)
    sentinel = always.sentinel()
    sentinel.look_around(seconds=0.0)
    assert always.cores.at == 1
    # It grows slow so slowly that the window forgets how quick it was.
    later = Machine(lambda now_s: 1.0 + 0.01 * now_s, lambda _now_s: 1.0)
    sentinel = later.sentinel()
    later.cores.enter(0)
    while later.clock.now_s() < 20.0:
        sentinel.begin(patience_s=0.0)
        sentinel.wait()
        later.clock.advance(0.05)
    assert later.cores.at == 1


def test_where_both_cores_are_slow_a_wait_ends_on_the_first_that_is_not() -> None:
    machine = Machine(spell(2.0, 3.0), spell(2.0, 2.5))
    sentinel = machine.sentinel()
    sentinel.look_around(seconds=2.0)
    sentinel.begin(patience_s=10.0)
    machine.clock.advance(0.05)
    assert sentinel.wait() == pytest.approx(WORK_S)
    assert machine.cores.at == 1
    assert 2.5 <= machine.clock.now_s() < 2.53


def test_a_visit_waits_no_longer_than_its_patience_in_all_its_waits() -> None:
    machine = Machine(spell(2.0, 1e9))
    sentinel = machine.sentinel()
    sentinel.look_around(seconds=2.0)
    sentinel.begin(patience_s=0.3)
    for _ in range(3):
        assert sentinel.wait() == pytest.approx(1.5 * WORK_S)
    assert machine.clock.now_s() == pytest.approx(2.3, abs=0.05)


def test_no_more_than_a_share_of_the_time_goes_to_waiting() -> None:
    machine = Machine(lambda now_s: 1.5 if now_s % 1.0 > 0.05 else 1.0)
    waited_s = waited(machine, visits=200, patience_s=10.0)
    assert waited_s < (MOST_WAITING_RATIO + 0.1) * machine.clock.now_s()


def test_a_machine_that_stays_slow_is_as_it_is() -> None:
    machine = Machine(spell(1.0, 1e9))
    sentinel = machine.sentinel()
    sentinel.look_around(seconds=1.0)
    sentinel.begin(patience_s=100.0)
    machine.clock.advance(0.5 * WINDOW_S)
    assert sentinel.is_slow(sentinel.read())
    machine.clock.advance(WINDOW_S)
    assert not sentinel.is_slow(sentinel.read())


def test_a_single_interrupt_is_no_state_of_the_machine() -> None:
    runs = iter(range(10**6))
    machine = Machine(lambda _now_s: 50.0 if next(runs) % (1 + TIMES) == 2 else 1.0)
    assert machine.sentinel().read() == pytest.approx(WORK_S)


def test_waits_that_end_badly_make_waits_rare() -> None:
    # Quick for one reading in a second: the window remembers it, and nothing lasts.
    machine = Machine(lambda now_s: 1.0 if now_s % 1.0 < 0.005 else 1.5)
    waited_s = waited(machine, visits=400, patience_s=0.05)
    assert waited_s < 0.5 * MOST_WAITING_RATIO * machine.clock.now_s()


def test_a_visit_is_as_disturbed_as_its_worst_batch() -> None:
    sentinel = Machine(lambda _now_s: 1.0).sentinel()
    sentinel.begin(patience_s=1.0)
    assert sentinel.beside_s == 0.0
    sentinel.note(2.0)
    sentinel.note(1.0)
    assert sentinel.beside_s == 2.0
    sentinel.begin(patience_s=1.0)
    assert sentinel.beside_s == 0.0
