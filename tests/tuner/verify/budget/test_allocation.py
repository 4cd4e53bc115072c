"""The best set is the best, and a trial is worth what it can change."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.verify.budget.allocation import PROMISE, Item, best_set, values_X
from tuner.verify.budget.extrapolation import Belief

items = st.lists(
    st.builds(
        Item,
        group=st.integers(0, 3),
        # Multiples of the program's grain, so that nothing is lost to rounding.
        cost_s=st.integers(1, 20).map(lambda grains: grains * 0.2),
        value=st.floats(0.001, 1.0),
    ),
    max_size=7,
)


def _brute_force(result: list[Item], *, budget_s: float, most: int) -> float:
    best = 0.0
    for size in range(min(most, len(result)) + 1):
        for chosen in itertools.combinations(result, size):
            groups = {one.group for one in chosen}
            cost_s = sum(one.cost_s for one in chosen)
            if len(groups) == size and cost_s <= budget_s + 1e-9:
                best = max(best, sum(one.value for one in chosen))
    return best


@given(result=items, most=st.integers(0, 5))
@settings(deadline=None, max_examples=150)
def test_the_set_is_the_one_that_trying_all_finds(result: list[Item], most: int) -> None:
    # A budget of 500 grains of 0.02 s; all items together cost more or less.
    chosen = best_set(result, budget_s=10.0, most=most)
    kept = [result[place] for place in chosen]
    assert len({one.group for one in kept}) == len(kept) <= most
    assert sum(one.cost_s for one in kept) <= 10.0 + 1e-9
    every_s = sum(
        max(one.cost_s for one in result if one.group == group)
        for group in {one.group for one in result}
    )
    if every_s >= 10.0:
        best = _brute_force(result, budget_s=10.0, most=most)
        assert sum(one.value for one in kept) == pytest.approx(best)


@given(result=items, budget_s=st.floats(0.01, 30.0))
@settings(deadline=None, max_examples=60)
def test_the_set_never_costs_more_than_the_budget(result: list[Item], budget_s: float) -> None:
    chosen = best_set(result, budget_s=budget_s, most=9)
    assert sum(result[place].cost_s for place in chosen) <= budget_s * (1.0 + 1e-9)


def test_without_a_limit_every_candidate_gets_its_most_valuable_trial() -> None:
    result = [
        Item(group=0, cost_s=1.0, value=0.1),
        Item(group=0, cost_s=100.0, value=0.2),
        Item(group=1, cost_s=7.0, value=0.3),
    ]
    assert best_set(result, budget_s=math.inf, most=9) == (1, 2)
    assert best_set(result, budget_s=math.inf, most=1) == (2,)
    assert best_set([], budget_s=math.inf, most=1) == ()


def _values(means: list[float], deviations: list[float]) -> list[float]:
    """What launching each whole job without noise is worth, independent beliefs."""
    belief = Belief(mean_s_T=np.array(means), covariance_TT=np.diag(np.square(deviations)))
    places = range(len(means))
    result = values_X(belief, candidates=places, trials=places, noise_s=[0.0] * len(means))
    return [float(one) for one in result]


def test_a_trial_saves_what_theory_says() -> None:
    # Two candidates alike, one known: E max(0, -z) of a standard normal z is 1 / sqrt(2 pi).
    known, unknown = _values([10.0, 10.0], [0.0, 1.0])
    assert unknown == pytest.approx(1.0 / math.sqrt(2.0 * math.pi), rel=0.02)
    assert known == 0.0
    # The best one's own deviation counts a hundredth beside.
    best, _ = _values([10.0, 12.0], [1.0, 0.0])
    # h(2) = phi(2) - 2 Phi(-2) = 0.00849.
    assert best == pytest.approx(0.00849 + PROMISE, rel=0.1)


def test_hopeless_candidates_are_worth_nothing_and_near_ones_something() -> None:
    _, near, far = _values([10.0, 10.2, 20.0], [0.5, 0.5, 0.5])
    assert near > 0.05
    assert far < 1e-6


def test_what_moves_all_candidates_alike_saves_nothing() -> None:
    common = np.full((2, 2), 4.0)
    belief = Belief(mean_s_T=np.array([10.0, 11.0]), covariance_TT=common)
    result = values_X(belief, candidates=(0, 1), trials=(1,), noise_s=[0.0])
    assert result[0] == pytest.approx(PROMISE * 2.0, abs=1e-9)
