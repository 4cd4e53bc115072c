"""Decides which trial to start next within a budget of time and devices.

    before every launch, from all measurements so far:
        infer    the step of every candidate and scaled-down job       extrapolation.py
        price    start-up + (warm-up + timed steps) * step             learnt from trials
        choose   the trial that is worth most per second of its cost
        start    it, or stop and say why

A trial is started only if it is predicted to end in time: at the upper end of its step's error
band, with the longest start-up seen. Before the first successful trial, start-up is START_UP_S. A
trial that still runs at the end of the budget is ended after a grace period of a twentieth of the
budget, a minute at most. If the budget covers all requested trials at full scale, nothing is
decided here.

The value of a trial is the expected saving: with beliefs mean m_j and covariance C over the steps
of the candidates, a trial x moves the means along one line, m + b z with z standard normal and
b_j = C_jx / sqrt(C_xx + noise^2), so that it saves

    w(x) = min_j m_j - E_z min_j (m_j + b_j z)        seconds of a step

by changing the choice (Frazier, Powell, Dayanik, "The knowledge-gradient policy for correlated
normal beliefs", INFORMS J. Computing 21(4), 2009). The expectation is taken at 255 quantiles of z.
To check the plan's prediction too, w includes a hundredth of the reduction of the standard
deviation of the best candidate's step; that decides if there is only one candidate.

The budget is wall time of one call; the devices are those of all parallel launches.

Not covered: queueing time of a job counts as start-up, once it was seen.

Letters: J candidates, X possible trials.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Final

import numpy as np

from tuner.arrays import Floats
from tuner.config.train import TrainDecision
from tuner.errors import SpecError
from tuner.units import format_ratio, format_s
from tuner.verify.budget.extrapolation import Belief, infer_belief, trial_evidence
from tuner.verify.budget.scale import Obstacle, Scale, describe_obstacles
from tuner.verify.budget.trial_options import TrialOption, TrialOptions
from tuner.verify.evidence import measured_s
from tuner.verify.records import TrialRecord

START_UP_S: Final[Mapping[bool, float]] = {True: 20.0, False: 180.0}
"""Our estimates, by whether the reference step runs: processes that import PyTorch and rendezvous;
an engine that also builds data sets and compiles."""

WORTH_RATIO: Final = 1e-3
"""Least expected saving of a trial, as a share of a step."""

STEP_NOISE_RATIO: Final = 0.02
"""Standard error expected of a trial's median step: 5 % a step, eight steps."""

QUANTILES: Final = np.array([NormalDist().inv_cdf((one + 0.5) / 255) for one in range(255)])
PROMISE: Final = 0.01

GRACE_RATIO: Final = 0.05
MOST_GRACE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The resources of all trials."""

    wall_s: float = math.inf
    max_devices: int | None = None
    """At once; None: as many as the candidates need."""

    @property
    def grace_s(self) -> float:
        """Grace period after the end of the budget, for a running trial."""
        return min(GRACE_RATIO * self.wall_s, MOST_GRACE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A possible trial."""

    cost_s: float
    value: float


Jobs = Sequence[tuple[TrainDecision, Scale | None]]
"""Candidates, at full scale (None) or scaled down."""


@dataclass(kw_only=True, eq=False)
class Spending:
    """Spends a budget; a resource with a clock."""

    possible: TrialOptions
    budget: Budget
    clock: Callable[[], float]
    num_steps: int
    """Per launch, warm-up included."""
    runs_reference: bool = True
    parallel: int = 1
    stopped: str = ""
    """Why no more trials are started; empty while some are."""
    has_chosen: bool = False
    """Whether the budget ever was too small for all trials."""
    _begun_s: float = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock."""
        self._begun_s = self.clock()

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget.wall_s - (self.clock() - self._begun_s)

    def latest_s(self) -> float:
        """Seconds from now after which a trial is ended in any case."""
        return max(0.0, self.left_s + self.budget.grace_s)

    def check(self) -> None:
        """Refuse a budget that is too small for any trial.

        Raises:
            SpecError: it names the cheapest trial, or why there is none.
        """
        options = self._open(records=(), running=())
        if not options:
            raise SpecError(self._why_nothing())
        cheapest = min(options, key=self._first_cost_s)
        cost_s = self._first_cost_s(cheapest)
        if cost_s > self.budget.wall_s:
            raise SpecError(
                f"--budget {format_s(self.budget.wall_s)}: the shortest trial is predicted to take"
                f" up to {format_s(cost_s)} ({cheapest.job.num_devices} devices,"
                f" {self.num_steps} steps); give more, or fewer --steps"
            )

    def holds_everything(self, records: Sequence[TrialRecord], *, trials: int) -> bool:
        """Whether the budget covers `trials` more full-scale jobs, whichever they are."""
        whole = [self.possible.whole(one) for one in self.possible.candidates()]
        if any(one.job.num_devices > self.possible.most_devices for one in whole):
            return False
        dearest_s = max((self._whole_cost_s(one, records) for one in whole), default=0.0)
        return trials * dearest_s <= self.left_s

    def has_room(self, running: Jobs) -> bool:
        """Whether any full-scale job fits on the allowed devices beside the running ones."""
        if self.budget.max_devices is None:
            return True
        busy = sum((scale or candidate).num_devices for candidate, scale in running)
        widest = max((one.num_devices for one in self.possible.candidates()), default=0)
        return busy + widest <= self.budget.max_devices

    def affords(self, candidate: TrainDecision, records: Sequence[TrialRecord]) -> bool:
        """Whether the full-scale job of a decision fits the rest of the budget."""
        cost_s = self._whole_cost_s(self.possible.whole(candidate), records)
        return cost_s <= self.left_s and candidate.num_devices <= self.possible.most_devices

    def next(
        self, records: Sequence[TrialRecord], *, running: Jobs, trials: int
    ) -> TrialOption | None:
        """Return the job to launch now; None if there is none, and then `stopped` says why.

        Args:
            records: of all trials so far.
            running: trials that have begun and not ended.
            trials: that may still be started.
        """
        self.has_chosen = True
        options = self._open(records=records, running=running)
        items, best_s = self._items(options, records)
        running_options = [
            one for job in running if (one := self.possible.option(*job)) is not None
        ]
        free = self.possible.most_devices - sum(one.job.num_devices for one in running_options)
        busy = {candidate for candidate, _ in running}
        affordable = [
            place
            for place, (option, item) in enumerate(zip(options, items, strict=True))
            if item.cost_s <= self.left_s
            and option.job.num_devices <= free
            and option.job.candidate not in busy
        ]
        if own := self._own_first(options, items, affordable, records=records, busy=busy):
            self.stopped = ""
            return own
        worthy = [place for place in affordable if items[place].value >= WORTH_RATIO * best_s]
        if trials < 1 or not worthy:
            self.stopped = self._why_stopped(items, affordable=affordable, trials=trials)
            return None
        self.stopped = ""
        return options[max(worthy, key=lambda place: items[place].value / items[place].cost_s)]

    def _own_first(
        self,
        options: Sequence[TrialOption],
        items: Sequence[Item],
        affordable: Sequence[int],
        *,
        records: Sequence[TrialRecord],
        busy: Set[TrainDecision],
    ) -> TrialOption | None:
        """Return the most valuable trial of the plan's own choice if it has none yet."""
        own = self.possible.space.plan.decision
        if own in busy:
            return None
        if any(record.decision == own for record in records):
            return None
        places = [place for place in affordable if options[place].job.candidate == own]
        best = max(places, key=lambda place: (items[place].value, -items[place].cost_s), default=-1)
        return None if best < 0 else options[best]

    def without_own_choice(self) -> tuple[str, ...]:
        """Say in one line why the plan's own choice has no trial; nothing if it has one."""
        own = self.possible.space.plan.decision
        if own is None or self.possible.options_of(own):
            return ()
        (reason,) = describe_obstacles([self.possible.why_none(own)])
        return (f"the plan's own choice has no trial: {reason}",)

    def stop_notes(self, records: Sequence[TrialRecord]) -> tuple[str, ...]:
        """Say why no more was launched, and which candidates had no trial."""
        if not self.has_chosen:
            return ()
        stopped = (f"stopped: {self.stopped}",) if self.stopped else ()
        return (*stopped, *self.left_out(records))

    def left_out(self, records: Sequence[TrialRecord]) -> tuple[str, ...]:
        """Count the candidates without a trial by reason."""
        tried = {record.decision for record in records}
        own = self.without_own_choice()
        skipped = {self.possible.space.plan.decision} if own else set()
        reasons: dict[str, list[Obstacle]] = {}
        for candidate in self.possible.candidates():
            if candidate not in tried | skipped:
                obstacle = self._why_untried(candidate, records)
                reasons.setdefault(obstacle.rule, []).append(obstacle)
        return (
            *own,
            *(
                f"{len(same_rule)} candidate{'s' if len(same_rule) > 1 else ''} without a trial:"
                f" {describe_obstacles(same_rule)[0]}"
                for same_rule in reasons.values()
            ),
        )

    def _why_nothing(self) -> str:
        """Say why there is no trial at all, naming the option that excludes them."""
        candidates = self.possible.candidates()
        if not candidates:
            return "no candidate of the plan fits in memory: nothing can be launched; plan anew"
        # Without a limit the full-scale jobs are options.
        reasons = describe_obstacles([self.possible.why_none(one) for one in candidates])
        fewest = self.possible.fewest_devices()
        remedy = "" if fewest is None else f"; give --max-devices {fewest} or more"
        return (
            f"--max-devices {self.possible.most_devices}: no trial is small enough:"
            f" {'; '.join(reasons)}{remedy}"
        )

    def _why_untried(self, candidate: TrainDecision, records: Sequence[TrialRecord]) -> Obstacle:
        options = self.possible.options_of(candidate)
        if not options:
            return self.possible.why_none(candidate)
        items, _ = self._items(options, records)
        if min(item.cost_s for item in items) > self.left_s:
            return Obstacle(rule="the budget ran out")
        return Obstacle(
            rule="not worth one" if self.stopped else "the requested number of trials is reached"
        )

    def _why_stopped(self, items: Sequence[Item], *, affordable: Sequence[int], trials: int) -> str:
        if trials < 1:
            return ""
        if not items:
            return "every candidate was launched"
        if not affordable:
            cheapest_s = min(item.cost_s for item in items)
            return (
                f"{format_s(max(0.0, self.left_s))} of the budget are left and the cheapest trial"
                f" takes up to {format_s(cheapest_s)}"
            )
        return f"no further trial is expected to save {format_ratio(WORTH_RATIO)} of a step"

    def _items(
        self, options: Sequence[TrialOption], records: Sequence[TrialRecord]
    ) -> tuple[list[Item], float]:
        """Return the options as items, and the step of the best candidate in seconds."""
        candidates = self.possible.candidates()
        whole = [self.possible.whole(one).job for one in candidates]
        seen = trial_evidence(self.possible, records)
        jobs = [*whole, *(option.job for option in options)]
        belief = infer_belief(seen, jobs, band_ratio=self.possible.band_ratio)
        places = range(len(whole), len(jobs))
        values = values_X(
            belief,
            candidates=range(len(whole)),
            trials=places,
            noise_s=[STEP_NOISE_RATIO * float(belief.mean_s_T[place]) for place in places],
        )
        items = [
            Item(
                cost_s=self._cost_s(option, belief, place, records)
                if seen
                else self._first_cost_s(option),
                value=float(value),
            )
            for option, place, value in zip(options, places, values, strict=True)
        ]
        return items, float(belief.mean_s_T[: len(whole)].min())

    def _open(self, *, records: Sequence[TrialRecord], running: Jobs) -> list[TrialOption]:
        """Return the options that were not launched yet."""
        done = {(one.decision, one.scale) for one in records}
        done |= set(running)
        # Scaled-down jobs add nothing once the full-scale one was measured.
        whole = {one.decision for one in records if one.scale is None and one.status == "ok"}
        return [
            option
            for candidate in self.possible.candidates()
            if candidate not in whole
            for option in self.possible.options_of(candidate)
            if (candidate, option.job.scale) not in done
        ]

    def _cost_s(
        self, option: TrialOption, belief: Belief, place: int, records: Sequence[TrialRecord]
    ) -> float:
        """Predict the wall time of a launch from measurements, at the upper end of the band."""
        step_s = float(belief.mean_s_T[place]) + belief.error_s(place)
        return self._start_up_s(records) + self.num_steps * step_s

    def _first_cost_s(self, option: TrialOption) -> float:
        """Predict the wall time of a launch from the model only."""
        return self._start_up_s(()) + self.num_steps * option.predicted.step_time_s_band[1]

    def _whole_cost_s(self, option: TrialOption, records: Sequence[TrialRecord]) -> float:
        seen = trial_evidence(self.possible, records)
        if not seen:
            return self._first_cost_s(option)
        belief = infer_belief(seen, [option.job], band_ratio=self.possible.band_ratio)
        return self._cost_s(option, belief, 0, records)

    def _start_up_s(self, records: Sequence[TrialRecord]) -> float:
        """Return the longest time outside the timed steps of any successful trial.

        It includes the warm-up, which also counts among a launch's steps: first steps are slow.
        Before the first successful trial: our estimate.
        """
        spent = [
            one.wall_s - len(one.measured_steps_s) * measured_s(one)
            for one in records
            if one.status == "ok"
        ]
        return max(0.0, max(spent, default=START_UP_S[self.runs_reference]))


def values_X(
    belief: Belief, *, candidates: Sequence[int], trials: Sequence[int], noise_s: Sequence[float]
) -> Floats:
    """Return the value of each trial, in seconds of a step.

    Args:
        belief: about full-scale jobs and trials together.
        candidates: indices of the full-scale jobs in it.
        trials: indices of the trials.
        noise_s: standard error of each trial's step.
    """
    mean_J = belief.mean_s_T[list(candidates)]
    covariance = belief.covariance_TT
    best = int(np.argmin(mean_J))
    before_s = math.sqrt(max(0.0, float(covariance[candidates[best], candidates[best]])))
    value_X = np.zeros(len(trials))
    for place, (trial, noise) in enumerate(zip(trials, noise_s, strict=True)):
        spread = math.sqrt(float(covariance[trial, trial]) + noise**2)
        line_J = covariance[list(candidates), trial] / spread if spread > 0.0 else 0.0 * mean_J
        after_s = np.min(mean_J[:, None] + np.outer(line_J, QUANTILES), axis=0).mean()
        left_s = math.sqrt(max(0.0, before_s**2 - float(line_J[best]) ** 2))
        value_X[place] = max(0.0, mean_J[best] - after_s) + PROMISE * (before_s - left_s)
    return value_X
