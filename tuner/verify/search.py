"""Chooses the next decision to launch: the plan's own, then what Optuna's sampler proposes.

The sampler works on a copy of the study in memory, with the trials that ended and those that run.

The search is over decisions of one kind. A space of another kind implements
`space.DecisionSpace`, its records extend `records.LaunchRecord`, and both are named where
the study is joined (`study.shared.TrialKind`).

study/ holds how the study is stored, how several processes share it, and what becomes of the trials
of a process that died. The loop is the caller's: propose, launch, record.

To the sampler the model's predictions are the prior, and launches correct them:

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
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from tuner.verify.budget.scale import Scale
from tuner.verify.records import AnyRecord, Decision, Knobs, LaunchRequest, PricedPoint, Proposal
from tuner.verify.space import DecisionSpace
from tuner.verify.study.shared import SharedStudy, StudySnapshot, Wanted, sampler_value_s

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
        self._logs = np.log([point.predicted for point in points])
        self._shared = _shared_knobs([point.knobs for point in points])
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
        others = [peer for peer in study.get_trials(deepcopy=False) if peer.number != trial.number]
        measured = {
            peer.params[POINT]: peer.user_attrs[METRICS]
            for peer in others
            if METRICS in peer.user_attrs
        }
        running = {peer.params[POINT] for peer in others if peer.state is TrialState.RUNNING}
        taken = {peer.params[POINT] for peer in others}
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
        free = [
            point
            for point in range(len(self._logs))
            if point not in taken and point not in measured
        ]
        if not free:
            raise LookupError("every point was launched")
        posteriors = [
            self._posterior(
                {
                    at: math.log(value)
                    for at, metrics in measured.items()
                    if (value := metrics[metric])
                },
                metric,
                running,
            )
            for metric in range(self._logs.shape[1])
        ]
        (mean, error), *limited = posteriors
        holds = np.ones(len(self._logs))
        for excess, its_error in limited:
            holds *= _normal(-excess / its_error)
        kept = [at for at, metrics in measured.items() if metrics[0] and _holds(metrics[1:])]
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
        spread = max(
            SPREADS, key=lambda candidate: self._likelihood(missed, seen, metric, candidate)
        )
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
        identity = np.eye(len(self._logs))
        covariance: NDArray[np.float64] = 0.5 * spread**2 * (self._shared + identity)
        return covariance + self._errors[metric] ** 2

    def _noisy(self, covariance: NDArray[np.float64], seen: list[int]) -> NDArray[np.float64]:
        """Return the covariance of launches at these points."""
        return np.asarray(covariance[np.ix_(seen, seen)] + NOISE**2 * np.eye(len(seen)))


def _normal(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard normal distribution's values."""
    return np.array([0.5 + 0.5 * math.erf(value / math.sqrt(2.0)) for value in values])


def _holds(metrics: Sequence[float | None]) -> bool:
    return all(value is not None and value <= 1.0 for value in metrics)


def _shared_knobs(points: Sequence[Knobs]) -> NDArray[np.float64]:
    """Return the similarity of each two points, 0 to 1, by the knobs that differ somewhere."""
    names = [
        name for name in (points[0] if points else ()) if len({point[name] for point in points}) > 1
    ]
    similarity = np.ones((len(points), len(points)))
    for first, second in itertools.combinations(range(len(points)), 2):
        values = [_similarity(points[first][name], points[second][name]) for name in names]
        similarity[first, second] = similarity[second, first] = sum(values) / max(1, len(values))
    return similarity


def _similarity(first: str | float, second: str | float) -> float:
    if first == second:
        return 1.0
    if isinstance(first, str) or isinstance(second, str) or min(first, second) <= 0.0:
        return 0.0
    return math.exp2(-abs(math.log2(first / second)))


FIRST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 1.0
"""Longest polling interval for trials of other workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Generic[Decision]):
    """Nothing can be launched before running trials have ended."""

    open: tuple[Proposal[Decision], ...]


RequestSource = Callable[[StudySnapshot[Decision, AnyRecord]], Sequence[LaunchRequest[Decision]]]
"""Returns what to launch next, best first; an empty result ends the trials."""


class StudySearch(Generic[Decision, AnyRecord]):
    """Proposes decisions and takes results, for this worker of a shared study."""

    def __init__(
        self,
        space: DecisionSpace[Decision, Any, AnyRecord],
        shared: SharedStudy[Decision, AnyRecord],
    ) -> None:
        self._points, self._measured = space.points(), space.measured
        self._sampler = PriorSampler(tuple(self._points.values()), errors=space.errors)
        self._shared = shared
        self.earlier = frozenset(shared.records)
        """Numbers of the trials of earlier calls."""
        self._pause_s = FIRST_PAUSE_S
        self._has_reported = False

    @property
    def records(self) -> tuple[AnyRecord, ...]:
        """Every trial that ended, by number, as of the last proposal."""
        return tuple(self._shared.records[number] for number in sorted(self._shared.records))

    def propose(
        self, requests: RequestSource[Decision, AnyRecord]
    ) -> Proposal[Decision] | Waiting[Decision] | None:
        """Claim the first request that is possible; None if nothing is left and all have ended."""
        while True:
            seen = self._shared.look()
            granted = (self._granted(wish, seen) for wish in requests(seen))
            wanted = next((grant for grant in granted if grant is not None), None)
            if wanted is None:
                return Waiting(open=seen.open) if seen.open else None
            proposal = self._shared.claim(wanted, seen)
            if proposal is not None:
                self._pause_s = FIRST_PAUSE_S
                return proposal
            # A random pause keeps workers that claim at the same moment from doing so again.
            time.sleep(random.uniform(0.0, FIRST_PAUSE_S))

    def record(self, proposal: Proposal[Decision], record: AnyRecord) -> bool:
        """Store the record of a launch; False if another worker took the trial over."""
        return self._shared.record(proposal, record)

    def wait(self, waiting: Waiting[Decision], pause: Callable[[float], None] = time.sleep) -> None:
        """Wait for trials of other workers, longer from call to call; print a message once."""
        if self._pause_s == LONGEST_PAUSE_S and not self._has_reported:
            count = len(waiting.open)
            self._shared.on_message(f"waiting for trials of other processes: {count} running")
            self._has_reported = True
        pause(self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, LONGEST_PAUSE_S)

    def _granted(
        self, wish: LaunchRequest[Decision], seen: StudySnapshot[Decision, AnyRecord]
    ) -> Wanted | None:
        if wish.decision is None:
            among = dict.fromkeys(self._points) if wish.among is None else wish.among
            return self._new(among, seen)
        running = [proposal.decision for proposal in seen.open]
        if wish.decision in running or wish.decision not in self._points:
            return None
        return {"decision": wish.decision, "scale": wish.scale, "origin": "repeat"}

    def _new(
        self, among: Mapping[Decision, Scale | None], seen: StudySnapshot[Decision, AnyRecord]
    ) -> Wanted | None:
        """Return a decision that was not launched yet, the plan's first; None if all were."""
        records = {record.job: record for record in seen.records}
        running = [proposal.decision for proposal in seen.open]
        decisions, trials = tuple(self._points), list[FrozenTrial]()
        for place, decision in enumerate(decisions):
            known = records.get((decision, None)) or records.get((decision, among.get(decision)))
            if known is not None or decision in running or decision not in among:
                trials.append(self._trial(place, known, is_running=decision in running))
        if len(trials) == len(decisions):
            return None
        origin, free = "plan", decisions[0]
        if trials and trials[0].params[POINT] == 0:
            study = optuna.create_study(sampler=self._sampler)
            study.add_trials(trials)
            origin, free = "sampler", decisions[study.ask(self._sampler.space).params[POINT]]
        return {"decision": free, "scale": among[free], "origin": origin}

    def _trial(self, place: int, known: AnyRecord | None, *, is_running: bool) -> FrozenTrial:
        """Return the trial of a decision that may not be launched, as the sampler sees it."""
        unknown = TrialState.RUNNING if is_running else TrialState.FAIL
        return optuna.trial.create_trial(
            state=unknown if known is None else TrialState.COMPLETE,
            value=None if known is None else sampler_value_s(known),
            params={POINT: place},
            distributions=self._sampler.space,
            user_attrs={} if known is None else {METRICS: self._measured(known)},
        )
