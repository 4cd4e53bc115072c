"""Statistics of measured steps: noise, ties, and early termination of trials.

    e(x) = 1.2533 * IQR(x) / 1.349 / sqrt(n)      standard error of the median of n steps x

1.2533 = sqrt(pi / 2) is the median's asymptotic standard error over that of the mean, and 1.349 the
interquartile range over the standard deviation, both of the normal distribution. Two trials tie
when their medians differ by at most 2 (e_1 + e_2).

A trial is hopeless if its median so far minus twice its error exceeds the best median plus twice
its error by a margin: launches of one decision differ by more than the steps within a launch.

Not covered: drift within a launch, which the interquartile range does not separate from noise.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Final

from tuner.units import format_ratio
from tuner.verify.records import TrialRecord

HOPELESS_MARGIN_RATIO: Final = 0.10
"""Twice the 5 % by which steps of one decision vary between launches
(tuner/verify/recalibration.py)."""

HOPELESS_STEPS: Final = 3
"""Minimum for an interquartile range."""


def median_error_s(steps_s: Sequence[float]) -> float:
    """Return the standard error of the median, in seconds; 0 for fewer than two steps."""
    if len(steps_s) < 2:
        return 0.0
    low_s, _, high_s = statistics.quantiles(steps_s, n=4)
    return 1.2533 * (high_s - low_s) / 1.349 / math.sqrt(len(steps_s))


def is_tie(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether two medians differ by at most twice the sum of their standard errors."""
    noise = median_error_s(first) + median_error_s(second)
    return abs(statistics.median(first) - statistics.median(second)) <= 2.0 * noise


def slower_than(records: Sequence[TrialRecord]) -> Callable[[Sequence[float]], str]:
    """Return the test that ends a trial which can no longer become the fastest."""
    ran = [one for one in records if one.status == "ok"]
    best = min(ran, key=measured_s, default=None)

    def hopeless(steps_s: Sequence[float]) -> str:
        if best is None or len(steps_s) < HOPELESS_STEPS:
            return ""
        so_far_s = statistics.median(steps_s)
        least_s = so_far_s - 2.0 * median_error_s(steps_s)
        most_s = measured_s(best) + 2.0 * median_error_s(best.measured_steps_s)
        if least_s <= most_s * (1.0 + HOPELESS_MARGIN_RATIO):
            return ""
        slower = format_ratio(so_far_s / measured_s(best) - 1.0)
        return f"ended after {len(steps_s)} steps, {slower} slower than the best so far"

    return hopeless


def measured_ratio(record: TrialRecord) -> float:
    """Return the measured step of a trial that ran over the predicted one."""
    return measured_s(record) / record.predicted_step_s


def measured_s(record: TrialRecord) -> float:
    """Return the measured step time of a trial that ran."""
    if record.measured_step_s is None:
        raise ValueError(f"trial {record.number} was not measured")
    return record.measured_step_s
