"""Decides which trial is begun next, so that a budget of time and devices is never exceeded.

    before every launch, from all that was measured so far:
        believe  what every candidate and every smaller job takes      extrapolation.py
        price    start-up + (warm-up + timed steps) * step             learnt from trials
        choose   the set worth most that fits what is left             allocation.py
        begin    its most valuable trial, or stop and say why

A trial is begun only if it is predicted to end in time: at the upper end of its step's error, with
the longest start-up that was seen. Until a trial went well, start-up is taken as START_UP_S. What
still runs when the budget is over is ended after a grace of a twentieth of the budget, a minute at
most. Where the budget holds all that was asked for at full size, nothing is decided here.

The budget is of one call, and of wall time; the devices are those of all launches at a time.

Not covered: what a job waits in a queue counts as start-up, once it was seen.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final

from tuner.errors import SpecError
from tuner.plan import TrainDecision
from tuner.units import format_ratio, format_s
from tuner.verify.budget.allocation import Item, best_set, values_X
from tuner.verify.budget.estimates import evidence_of
from tuner.verify.budget.extrapolation import Belief, believed
from tuner.verify.budget.obstacles import Obstacle, in_words, with_the_own_choice
from tuner.verify.budget.possible import Option, Possible
from tuner.verify.budget.scale import Scale
from tuner.verify.evidence import measured_s
from tuner.verify.records import TrialRecord

START_UP_S: Final[Mapping[bool, float]] = {True: 20.0, False: 180.0}
"""Our estimates, by whether the reference step runs: processes that import PyTorch and meet; an
engine that builds data sets and compiles as well."""

WORTH_RATIO: Final = 1e-3
"""A trial is worth beginning that saves this share of a step."""

STEP_NOISE_RATIO: Final = 0.02
"""Standard error expected of a trial's median step: 5 % a step, eight steps."""

GRACE_RATIO: Final = 0.05
MOST_GRACE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What trials may use together."""

    wall_s: float = math.inf
    max_devices: int | None = None
    """At a time; None: as many as the candidates ask for."""

    @property
    def grace_s(self) -> float:
        """After the end of the budget, for a trial that still runs."""
        return min(GRACE_RATIO * self.wall_s, MOST_GRACE_S)


Jobs = Sequence[tuple[TrainDecision, Scale | None]]
"""Candidates, whole or at a scale."""


@dataclass(kw_only=True, eq=False)
class Spending:
    """A budget while it is spent; a resource with a clock."""

    possible: Possible
    budget: Budget
    clock: Callable[[], float]
    num_steps: int
    """Of one launch, warm-up included."""
    runs_reference: bool = True
    parallel: int = 1
    stopped: str = ""
    """Why nothing more is begun; empty while something is."""
    has_chosen: bool = False
    """Whether the budget was short at any time."""
    _begun_s: float = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock."""
        self._begun_s = self.clock()

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget.wall_s - (self.clock() - self._begun_s)

    def latest_s(self) -> float:
        """Seconds from now after which a trial must be over, come what may."""
        return max(0.0, self.left_s + self.budget.grace_s)

    def check(self) -> None:
        """Refuse a budget that holds no trial at all.

        Raises:
            SpecError: it names the cheapest trial, or why there is none.
        """
        options = self._open(records=(), under_way=())
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
        """Whether so many more whole jobs fit, whichever they are."""
        whole = [self.possible.whole(one) for one in self.possible.candidates()]
        if any(one.job.num_devices > self.possible.most_devices for one in whole):
            return False
        dearest_s = max((self._cost_alone_s(one, records) for one in whole), default=0.0)
        return trials * dearest_s <= self.left_s

    def has_room(self, under_way: Jobs) -> bool:
        """Whether any whole job fits the devices that are allowed, beside what is under way."""
        if self.budget.max_devices is None:
            return True
        busy = sum((scale or candidate).num_devices for candidate, scale in under_way)
        widest = max((one.num_devices for one in self.possible.candidates()), default=0)
        return busy + widest <= self.budget.max_devices

    def affords(self, candidate: TrainDecision, records: Sequence[TrialRecord]) -> bool:
        """Whether the whole job of a decision fits what is left."""
        cost_s = self._cost_alone_s(self.possible.whole(candidate), records)
        return cost_s <= self.left_s and candidate.num_devices <= self.possible.most_devices

    def next(
        self, records: Sequence[TrialRecord], *, under_way: Jobs, trials: int
    ) -> Option | None:
        """Return the job to launch now; None where none is, and then `stopped` says why.

        Args:
            records: of all trials so far.
            under_way: begun and not ended.
            trials: that may still be begun.
        """
        self.has_chosen = True
        options = self._open(records=records, under_way=under_way)
        items, best_s = self._items(options, records)
        running = [one for job in under_way if (one := self.possible.option(*job)) is not None]
        free = self.possible.most_devices - sum(one.job.num_devices for one in running)
        busy = {candidate for candidate, _ in under_way}
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
        left_s = self.left_s * self.parallel
        left_s -= sum(self._cost_alone_s(one, records) for one in running)
        chosen = best_set(
            [items[place] for place in worthy], budget_s=max(0.0, left_s), most=trials
        )
        if not chosen:
            self.stopped = self._why_stopped(items, affordable=affordable, trials=trials)
            return None
        self.stopped = ""
        first = max((worthy[place] for place in chosen), key=lambda place: items[place].value)
        return options[first]

    def _own_first(
        self,
        options: Sequence[Option],
        items: Sequence[Item],
        affordable: Sequence[int],
        *,
        records: Sequence[TrialRecord],
        busy: Set[TrainDecision],
    ) -> Option | None:
        """Return the most valuable trial of the plan's own choice where none was begun yet."""
        own = self.possible.around.plan.decision
        if own in busy:
            return None
        if any(record.decision == own for record in records):
            return None
        places = [place for place in affordable if options[place].job.candidate == own]
        best = max(places, key=lambda place: (items[place].value, -items[place].cost_s), default=-1)
        return None if best < 0 else options[best]

    def without_own_choice(self) -> tuple[str, ...]:
        """Say in one line why the plan's own choice has no trial; nothing where it has one."""
        own = self.possible.around.plan.decision
        if own is None or self.possible.options_of(own):
            return ()
        (reason,) = in_words([self.possible.why_none(own)])
        return (f"the plan's own choice has no trial: {reason}",)

    def said(self, records: Sequence[TrialRecord]) -> tuple[str, ...]:
        """Say why no more was launched, and which candidates had no trial."""
        if not self.has_chosen:
            return ()
        stopped = (f"stopped: {self.stopped}",) if self.stopped else ()
        return (*stopped, *self.left_out(records))

    def left_out(self, records: Sequence[TrialRecord]) -> tuple[str, ...]:
        """Say of the candidates that had no trial, by reason, how many there are."""
        tried = {record.decision for record in records}
        own = self.without_own_choice()
        skipped = {self.possible.around.plan.decision} if own else set()
        reasons: dict[str, list[Obstacle]] = {}
        for candidate in self.possible.candidates():
            if candidate not in tried | skipped:
                obstacle = self._why_untried(candidate, records)
                reasons.setdefault(obstacle.rule, []).append(obstacle)
        return (
            *own,
            *(
                f"{len(alike)} candidate{'s' if len(alike) > 1 else ''} without a trial:"
                f" {in_words(alike)[0]}"
                for alike in reasons.values()
            ),
        )

    def _why_nothing(self) -> str:
        """Say why there is no trial at all, naming the option that rules them out."""
        candidates = self.possible.candidates()
        if not candidates:
            return "no candidate of the plan fits in memory: nothing can be launched; plan anew"
        # Without a limit the whole jobs are options.
        own, *others = (self.possible.why_none(one) for one in candidates)
        fewest = self.possible.fewest_devices()
        way_out = "" if fewest is None else f"; give --max-devices {fewest} or more"
        return (
            f"--max-devices {self.possible.most_devices}: no trial is small enough:"
            f" {with_the_own_choice(own, others)}{way_out}"
        )

    def _why_untried(self, candidate: TrainDecision, records: Sequence[TrialRecord]) -> Obstacle:
        options = self.possible.options_of(candidate)
        if not options:
            return self.possible.why_none(candidate)
        items, _ = self._items(options, records)
        if min(item.cost_s for item in items) > self.left_s:
            return Obstacle(rule="the budget ran out")
        return Obstacle(
            rule="not worth one" if self.stopped else "as many trials as were asked for"
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
        self, options: Sequence[Option], records: Sequence[TrialRecord]
    ) -> tuple[list[Item], float]:
        """Return the options as items, and the step seconds of the best candidate."""
        candidates = self.possible.candidates()
        whole = [self.possible.whole(one).job for one in candidates]
        seen = evidence_of(self.possible, records)
        jobs = [*whole, *(option.job for option in options)]
        belief = believed(seen, jobs, band_ratio=self.possible.band_ratio)
        places = range(len(whole), len(jobs))
        values = values_X(
            belief,
            candidates=range(len(whole)),
            trials=places,
            noise_s=[STEP_NOISE_RATIO * float(belief.mean_s_T[place]) for place in places],
        )
        items = [
            Item(
                group=candidates.index(option.job.candidate),
                cost_s=self._cost_s(option, belief, place, records)
                if seen
                else self._first_cost_s(option),
                value=float(value),
            )
            for option, place, value in zip(options, places, values, strict=True)
        ]
        return items, float(belief.mean_s_T[: len(whole)].min())

    def _open(self, *, records: Sequence[TrialRecord], under_way: Jobs) -> list[Option]:
        """Return what may be launched and was not yet."""
        done = {(one.decision, one.scale) for one in records}
        done |= set(under_way)
        # Nothing is left to learn of a candidate from a part of it once the whole was measured.
        whole = {one.decision for one in records if one.scale is None and one.status == "ok"}
        return [
            option
            for candidate in self.possible.candidates()
            if candidate not in whole
            for option in self.possible.options_of(candidate)
            if (candidate, option.job.scale) not in done
        ]

    def _cost_s(
        self, option: Option, belief: Belief, place: int, records: Sequence[TrialRecord]
    ) -> float:
        """Predict the wall time of a launch from what was measured, at the upper end."""
        step_s = float(belief.mean_s_T[place]) + belief.error_s(place)
        return self._start_up_s(records) + self.num_steps * step_s

    def _first_cost_s(self, option: Option) -> float:
        """Predict the wall time of a launch from the model alone."""
        return self._start_up_s(()) + self.num_steps * option.predicted.step_time_s_band[1]

    def _cost_alone_s(self, option: Option, records: Sequence[TrialRecord]) -> float:
        seen = evidence_of(self.possible, records)
        if not seen:
            return self._first_cost_s(option)
        belief = believed(seen, [option.job], band_ratio=self.possible.band_ratio)
        return self._cost_s(option, belief, 0, records)

    def _start_up_s(self, records: Sequence[TrialRecord]) -> float:
        """Return the longest time beside its timed steps that a trial which went well has taken.

        Its warm-up is in it, and is counted once more among a launch's steps: first steps are
        slow. Until a trial went well: our estimate.
        """
        spent = [
            one.wall_s - len(one.measured_steps_s) * measured_s(one)
            for one in records
            if one.status == "ok"
        ]
        return max(0.0, max(spent, default=START_UP_S[self.runs_reference]))
