"""What a failure log says about rates: intervals, and whether failures are exponential.

    interval   of n failures in a time: the rates under which n or more, and n or fewer, have a
               chance of (1 - level) / 2 (Garwood, Biometrika 28, 1936); exact, so wide for small n
    test       the gaps between failures on the clock of observed time, against an exponential
               distribution of their mean: Kolmogorov's distance, whose distribution under the
               hypothesis is simulated, since the mean is estimated (Lilliefors, JASA 64, 1969)

Bursts, wear and infant mortality all make gaps more uneven than exponential ones; failures that
come at regular times, e.g. of a leak, more even. The formulas of tuner/faults/interval.py hold for
exponential failures only; with bursts of the same rate they are pessimistic, since failures that
fall into a restart cost little.

Not covered: rates that differ between nodes, seasons.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.bisection import bisect
from tuner.spec.failure_log import COMPONENTS, Component, FailureLog

LEVEL: Final = 0.9
"""Chance that an interval covers the true rate."""
LEAST_GAPS: Final = 8
"""With fewer, hardly any distribution is told from an exponential one."""
MOST_GAPS: Final = 2000
"""Tested, the last ones; a test of more finds differences that do not matter."""
SIMULATIONS: Final = 2000
REJECTED_BELOW: Final = 0.01
SEED: Final = 20261127
HALVINGS: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRate:
    """Failures of one component."""

    component: Component
    count: int
    mtbf_s: float
    """Of one device, or one node for all others; infinite where none was seen."""
    mtbf_s_band: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialTest:
    """Whether gaps between failures may be exponential."""

    gaps: int
    probability: float
    """Of a distance as large as the observed one under exponential gaps."""
    variation: float
    """Standard deviation of the gaps over their mean: 1 where exponential, more for bursts."""

    @property
    def is_rejected(self) -> bool:
        """Whether failures are not exponential."""
        return self.probability < REJECTED_BELOW


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


def exponential_test(log: FailureLog) -> ExponentialTest | None:
    """Test the gaps between failures; None where the log has too few times."""
    gaps_N = np.diff(np.array(log.clock_s, dtype=np.float64))[-MOST_GAPS:]
    if len(gaps_N) < LEAST_GAPS or not gaps_N.sum() > 0.0:
        return None
    generator = np.random.default_rng(SEED)
    simulated = [_distance(generator.exponential(size=len(gaps_N))) for _ in range(SIMULATIONS)]
    observed = _distance(gaps_N)
    beyond = sum(distance >= observed for distance in simulated)
    return ExponentialTest(
        gaps=len(gaps_N),
        probability=(beyond + 1) / (SIMULATIONS + 1),
        variation=float(gaps_N.std() / gaps_N.mean()),
    )


def _distance(gaps_N: npt.NDArray[np.float64]) -> float:
    """Kolmogorov's distance to the exponential distribution of the same mean."""
    expected_N = -np.expm1(-np.sort(gaps_N) / gaps_N.mean())
    steps_N = np.arange(len(gaps_N) + 1) / len(gaps_N)
    return float(max((steps_N[1:] - expected_N).max(), (expected_N - steps_N[:-1]).max()))


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
