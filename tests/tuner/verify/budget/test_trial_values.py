"""A trial is worth what it can change."""

import math

import numpy as np
import pytest

from tuner.verify.budget.extrapolation import Belief
from tuner.verify.budget.scheduler import PROMISE, values_X


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
