"""The planner's objective: seconds of wall clock per step, failures included."""

from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Numbers
from tuner.faults.interval import cycle
from tuner.faults.reliability import Jobs, Reliability

LEAST_EFFECTIVE_RATIO: Final = 0.01
"""A run that needs a hundred times its undisturbed time counts as one that never finishes."""


def goodput_step_s(
    step_s: Numbers, *, jobs: Jobs, reliability: Reliability | None
) -> npt.NDArray[np.float64]:
    """Wall clock per step with failures, seconds, per candidate.

    Grows with step_s and is never below it, so a bound on the step time bounds this too; equals it
    where no failures are priced (reliability None). Infinite where the run never finishes.
    """
    undisturbed_s = np.asarray(step_s, dtype=np.float64)
    if reliability is None:
        return undisturbed_s
    ratio = np.asarray(cycle(jobs, reliability, step_s=step_s).effective_ratio)
    finishes = ratio >= LEAST_EFFECTIVE_RATIO
    return np.where(finishes, undisturbed_s / np.where(finishes, ratio, 1.0), np.inf)
