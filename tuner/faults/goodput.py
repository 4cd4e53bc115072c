"""Wall clock per step with failures, by which training configurations are compared."""

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Numbers
from tuner.faults.interval import LEAST_EFFECTIVE_RATIO, cycle
from tuner.faults.policies import choose_policy
from tuner.faults.reliability import FailureModel, Jobs


def goodput_step_s(
    step_s: Numbers, *, jobs: Jobs, reliability: FailureModel | None
) -> npt.NDArray[np.float64]:
    """Wall clock per step with failures, seconds, per candidate.

    With shared storage alone it grows with step_s, so a bound on the step time bounds this too; it
    is never below the step, and equals it where no failures are priced (reliability None). Infinite
    where the run never finishes, or no stated checkpoints are possible. With a level on hosts only
    numbers are taken, no arrays.
    """
    undisturbed_s = np.asarray(step_s, dtype=np.float64)
    if reliability is None:
        return undisturbed_s
    if reliability.host is None:
        ratio = np.asarray(cycle(jobs, reliability, step_s=step_s).effective_ratio)
    else:
        ratio = np.asarray(choose_policy(jobs, reliability, step_s=float(undisturbed_s)).ratio)
    finishes = ratio >= LEAST_EFFECTIVE_RATIO
    if reliability.interval_s is not None:
        finishes = finishes & (undisturbed_s <= reliability.interval_s)
    return np.where(finishes, undisturbed_s / np.where(finishes, ratio, 1.0), np.inf)
