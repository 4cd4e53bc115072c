"""Estimate failure rates, with their intervals, from a failure log.

Of n failures in a time: the rates under which n or more, and n or fewer, have a chance of
(1 - level) / 2 (Garwood, Biometrika 28, 1936); exact, so wide for small n. The formulas of
tuner/faults/interval.py hold for exponential failures; with bursts of the same rate they are
pessimistic, since failures that fall into a restart cost little.

Not covered: rates that differ between nodes, seasons.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.bisection import bisect
from tuner.spec.failure_log import COMPONENTS, Component, FailureLog

LEVEL: Final = 0.9
"""Chance that an interval covers the true rate."""
HALVINGS: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRate:
    """Failures of one component."""

    component: Component
    count: int
    mtbf_s: float
    """Mean seconds between failures of one device, or of one node for every other component;
    infinite where no failure was seen."""
    mtbf_s_band: tuple[float, float]


def observed_rates(log: FailureLog) -> tuple[ObservedRate, ...]:
    """Return the rate of every component that counts, with its interval."""
    rates = []
    for component in COMPONENTS:
        if component in log.counts:
            count, observed_s = log.counts[component], log.observed_s(component)
            low, high = poisson_interval(count)
            rates.append(
                ObservedRate(
                    component=component,
                    count=count,
                    mtbf_s=observed_s / count if count else math.inf,
                    mtbf_s_band=(observed_s / high, observed_s / low if low else math.inf),
                )
            )
    return tuple(rates)


def poisson_interval(count: int, *, level: float = LEVEL) -> tuple[float, float]:
    """Return the means under which a Poisson count is neither too large nor too small."""
    tail = (1.0 - level) / 2.0
    # Ten deviations to either side of the count, and ten more for small ones.
    far = count + 10.0 * math.sqrt(count + 1.0) + 10.0
    high = bisect(lambda mean: _at_most(count, mean) <= tail, 0.0, far, halvings=HALVINGS)
    if not count:
        return 0.0, high
    low = bisect(lambda mean: 1.0 - _at_most(count - 1, mean) >= tail, 0.0, far, halvings=HALVINGS)
    return low, high


def _at_most(count: int, mean: float) -> float:
    """Chance that a Poisson variable is at most a count."""
    if not mean:
        return 1.0
    # Terms beyond forty deviations below the mean are nothing.
    first = max(0, math.floor(min(count, mean) - 40.0 * math.sqrt(mean + 1.0)))
    numbers = np.arange(first, count + 1, dtype=np.float64)
    steps = np.log(mean / np.maximum(numbers[1:], 1.0))
    logs = first * math.log(mean) - mean - math.lgamma(first + 1.0)
    terms = logs + np.concatenate([[0.0], np.cumsum(steps)])
    return float(min(np.exp(terms).sum(), 1.0))
