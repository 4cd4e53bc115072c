"""Which sizes are measured again, by the gains so far."""

import math
from collections.abc import Callable

from profilers.noise.revisits import LEAST_SHARE, MAX_SESSIONS, MOST_SHARE, Revisits
from profilers.records import Case
from tests.profilers.testing import gemm_case

SIZES = range(1, 41)
ERROR_RATIO = 0.1


def choose(
    revisits: Revisits,
    excess: dict[int, float],
    *,
    num_new: int = 8,
    always: tuple[Case, ...] = (),
    cost_s: Callable[[Case], float] = lambda _case: 0.02,
) -> list[int]:
    chosen = revisits.choose(
        [(gemm_case(m), by) for m, by in excess.items()],
        always=always,
        cost_s=cost_s,
        num_new=num_new,
        error_ratio=ERROR_RATIO,
    )
    return [case.axes["m"] for case in chosen]


def settled(*, gain: float) -> Revisits:
    """Forty sizes, after a batch whose further sessions gained so much."""
    gains: dict[str, float] = {}
    revisits = Revisits(gains=gains)
    for m in choose(revisits, dict.fromkeys(SIZES, 0.2)):
        gains[gemm_case(m).id] = gain
    return revisits


def test_the_slowest_come_first_and_the_fast_ones_never() -> None:
    excess = {1: 0.1, 2: 0.5, 3: -0.4, 4: 0.3, 5: -0.001}
    revisits = Revisits()
    assert choose(revisits, excess, num_new=16)[:3] == [2, 4, 1]
    assert 3 not in choose(revisits, excess, num_new=100)


def test_on_a_quiet_machine_little_is_measured_again() -> None:
    revisits = settled(gain=0.0)
    assert len(choose(revisits, dict.fromkeys(SIZES, 0.2))) == LEAST_SHARE * 8
    choose(revisits, {})
    assert revisits.summary() == ""


def test_on_a_disturbed_machine_most_sessions_are_repeated_ones_and_the_summary_says_so() -> None:
    revisits = settled(gain=math.log(1.5))
    assert revisits.summary() == ""
    # No size looks slow if all of a stretch was disturbed equally.
    chosen = choose(revisits, dict.fromkeys(SIZES, 0.0))
    assert len(chosen) == MOST_SHARE * 8
    assert "33 % faster" in revisits.summary()


def test_of_two_equally_doubtful_the_cheaper_one_comes_first() -> None:
    revisits = Revisits()
    cost_s = {1: 1.0, 2: 0.1}
    chosen = choose(revisits, {1: 0.3, 2: 0.3}, cost_s=lambda case: cost_s[case.axes["m"]])
    assert chosen == [2, 1]


def test_expensive_sizes_are_not_repeated_at_the_cost_of_all_others() -> None:
    sizes = range(1, 101)
    revisits = Revisits()
    # Ten are a hundred times as expensive, and as doubtful.
    chosen = choose(
        revisits,
        dict.fromkeys(sizes, 0.2),
        num_new=16,
        cost_s=lambda case: 1.0 if case.axes["m"] <= 10 else 0.01,
    )
    assert len(chosen) == LEAST_SHARE * 16
    assert min(chosen) > 10


def test_a_size_that_stays_slow_costs_a_few_sessions() -> None:
    revisits = Revisits()
    sessions = 1
    while choose(revisits, {1: 0.9}):
        sessions += 1
        assert sessions <= MAX_SESSIONS
    assert sessions == MAX_SESSIONS


def test_cases_to_repeat_always_are_chosen_whatever_they_took() -> None:
    revisits = Revisits()
    chosen = choose(revisits, {2: -0.5}, num_new=0, always=(gemm_case(1),))
    assert chosen == [1]
