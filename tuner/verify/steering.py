"""Chooses what Optuna launches next: the model's predictions are the prior, launches correct them.

    r(x) = log(measured / predicted) of a metric at point x, a Gaussian process of mean zero:
    k(x, y) = E^2 + s^2 (mean over knobs of c(x_knob, y_knob) + [x = y]) / 2
    c       = 2^-|log2(x / y)| of two numbers, [x = y] of words

E is what the model may miss everywhere (`DecisionSpace.errors`); the second term is what it misses
about a knob or a point, with the s of SPREADS under which the launches are likeliest. The next
point has the largest expected improvement of the first metric, in logarithms, times the chance that
every other metric stays at most at its limit (Schonlau 1998, Gardner et al. 2014). Points that run
elsewhere count as launched with the expected result ("kriging believer", Ginsbourger et al. 2010).
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from tuner.verify.proposal import Knobs, PricedPoint

SPREADS: Final = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0)
"""Candidate standard deviations s of the model's logarithmic error from point to point."""
NOISE: Final = 0.02
"""Standard deviation of a launch's result, in logarithms."""
LEAST_GAIN: Final = 1e-9
POINT: Final = "point"
METRICS: Final = "metrics"


class PriorSampler(optuna.samplers.BaseSampler):
    """Proposes points that no trial has, best first.

    Each point is a value of the one categorical parameter `point`. A trial that ran has its metrics
    as the attribute `metrics`; one that failed has none, and counts as one with nothing learnt.
    """

    def __init__(self, points: Sequence[PricedPoint], *, errors: Sequence[float]) -> None:
        self._errors = errors
        self._logs = np.log([one.predicted for one in points])
        self._shared = _shared_knobs([one.knobs for one in points])
        self.space: dict[str, BaseDistribution] = {
            POINT: CategoricalDistribution(tuple(range(len(points))))
        }

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the one parameter."""
        return self.space

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Return the point to launch next.

        Raises:
            LookupError: every point has a trial.
        """
        others = [one for one in study.get_trials(deepcopy=False) if one.number != trial.number]
        measured = {
            one.params[POINT]: one.user_attrs[METRICS]
            for one in others
            if METRICS in one.user_attrs
        }
        running = {one.params[POINT] for one in others if one.state is TrialState.RUNNING}
        taken = {one.params[POINT] for one in others}
        return {POINT: self.choose(measured, running=running, taken=taken)}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Refuse a parameter that is not the point."""
        raise ValueError(f"{param_name}: the only parameter is {POINT}")

    def choose(
        self,
        measured: Mapping[int, Sequence[float | None]],
        *,
        running: Collection[int] = (),
        taken: Collection[int] = (),
    ) -> int:
        """Return the free point with the largest feasible expected improvement.

        Args:
            measured: metrics by point, as `PricedPoint.predicted`.
            running: points of open trials.
            taken: points that are not proposed again, the measured and the running among them.

        Raises:
            LookupError: none is free.
        """
        free = [one for one in range(len(self._logs)) if one not in taken and one not in measured]
        if not free:
            raise LookupError("every point was launched")
        posteriors = [
            self._posterior(
                {at: math.log(value) for at, one in measured.items() if (value := one[metric])},
                metric,
                running,
            )
            for metric in range(self._logs.shape[1])
        ]
        (mean, error), *limited = posteriors
        holds = np.ones(len(self._logs))
        for excess, its_error in limited:
            holds *= _normal(-excess / its_error)
        kept = [at for at, one in measured.items() if one[0] and _holds(one[1:])]
        best = min((mean[at] for at in kept), default=float(mean[free].max()) + 1.0)
        ratio = (best - mean) / error
        density = np.exp(-0.5 * ratio**2) / math.sqrt(2.0 * math.pi)
        gain = error * (ratio * _normal(ratio) + density) * holds
        # If no gain is left, take the best of the points that likely keep their limits.
        gain[gain < LEAST_GAIN] = 0.0
        return max(free, key=lambda at: (gain[at], holds[at] >= 0.5, -mean[at]))

    def _posterior(
        self, known: Mapping[int, float], metric: int, running: Collection[int]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and standard deviation of a metric's logarithm at every point."""
        prior = self._logs[:, metric]
        seen = list(known)
        missed = np.array([known[at] - prior[at] for at in seen])
        spread = max(SPREADS, key=lambda one: self._likelihood(missed, seen, metric, one))
        covariance = self._covariance(metric, spread)
        mean = prior + covariance[:, seen] @ np.linalg.solve(self._noisy(covariance, seen), missed)
        seen = [*seen, *running]
        shared = covariance[:, seen]
        known_N = np.sum(
            shared * np.linalg.solve(self._noisy(covariance, seen), shared.T).T, axis=1
        )
        return mean, np.asarray(np.sqrt(np.maximum(np.diag(covariance) - known_N, 1e-12)))

    def _likelihood(
        self, missed: NDArray[np.float64], seen: list[int], metric: int, spread: float
    ) -> float:
        noisy = self._noisy(self._covariance(metric, spread), seen)
        return float(-0.5 * (missed @ np.linalg.solve(noisy, missed) + np.linalg.slogdet(noisy)[1]))

    def _covariance(self, metric: int, spread: float) -> NDArray[np.float64]:
        own = np.eye(len(self._logs))
        covariance: NDArray[np.float64] = 0.5 * spread**2 * (self._shared + own)
        return covariance + self._errors[metric] ** 2

    def _noisy(self, covariance: NDArray[np.float64], seen: list[int]) -> NDArray[np.float64]:
        """Return the covariance of launches at these points."""
        return np.asarray(covariance[np.ix_(seen, seen)] + NOISE**2 * np.eye(len(seen)))


def _normal(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard normal distribution's values."""
    return np.array([0.5 + 0.5 * math.erf(one / math.sqrt(2.0)) for one in values])


def _holds(metrics: Sequence[float | None]) -> bool:
    return all(value is not None and value <= 1.0 for value in metrics)


def _shared_knobs(points: Sequence[Knobs]) -> NDArray[np.float64]:
    """Return the similarity of each two points, 0 to 1, by the knobs that differ somewhere."""
    names = [
        name for name in (points[0] if points else ()) if len({one[name] for one in points}) > 1
    ]
    similarity = np.ones((len(points), len(points)))
    for one, other in itertools.combinations(range(len(points)), 2):
        values = [_similarity(points[one][name], points[other][name]) for name in names]
        similarity[one, other] = similarity[other, one] = sum(values) / max(1, len(values))
    return similarity


def _similarity(one: str | float, other: str | float) -> float:
    if one == other:
        return 1.0
    if isinstance(one, str) or isinstance(other, str) or min(one, other) <= 0.0:
        return 0.0
    return math.exp2(-abs(math.log2(one / other)))
