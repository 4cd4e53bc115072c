"""Noise and hopeless trials, by hand."""

import pytest

from tests.tuner.verify.testing import Record
from tuner.verify.measured_steps import median_error_s, slower_than

NOISY_S = (1.9, 2.0, 2.0, 2.0, 2.1)
"""Quartiles 1.95 and 2.05: the median's error is 1.2533 * 0.1 / 1.349 / sqrt(5) = 0.0415 s."""


def test_the_error_of_a_median_by_hand() -> None:
    assert median_error_s(NOISY_S) == pytest.approx(0.04155, abs=1e-4)
    assert median_error_s((2.0,)) == 0.0


def test_a_trial_far_slower_than_the_best_is_hopeless(record: Record) -> None:
    hopeless = slower_than([record(0, measured_steps_s=NOISY_S)])
    # The best is at most 2.083 s, and 10 % more is 2.291 s.
    assert hopeless((2.28, 2.28, 2.28)) == ""
    assert hopeless((2.3, 2.3, 2.3)) == "ended after 3 steps, 15.0 % slower than the best so far"
    assert hopeless((9.0, 9.0)) == ""
    # Its median is 2.4 s, its error 0.19 s: it may still be a good one.
    assert hopeless((2.2, 2.4, 2.6)) == ""


def test_nothing_is_hopeless_before_anything_ran(record: Record) -> None:
    assert slower_than([])((9.0,) * 9) == ""
    assert slower_than([record(0, measured_s=None)])((9.0,) * 9) == ""
