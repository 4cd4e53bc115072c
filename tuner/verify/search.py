"""Chooses the next decision to launch: the plan's own proposals, then Optuna's sampler.

Seeds come first, in order; then TPE proposes points of the neighbourhood, with the excess over the
memory limit as its constraint. It works on a copy of the study in memory, to which every decision
is told that needs no launch: it was launched already, is being launched, cannot be launched by a
target or does not fit. Once the sampler repeats itself, the remaining decision with the shortest
predicted step is next.

The search is over decisions of one kind. A space of another kind implements
`neighbourhood.DecisionSpace`, its records extend `records.LaunchRecord`, and both are named where
the study is joined (`study.shared.TrialKind`).

study/ holds how the study is stored, how several processes share it, and what becomes of the trials
of a process that died. The loop is the caller's: propose, launch, record.
"""

import functools
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from tuner.verify.budget.scale import Scale
from tuner.verify.neighbourhood import PLANNED, DecisionSpace, Point
from tuner.verify.proposal import Decision, LaunchRequest, Origin, Proposal
from tuner.verify.records import AnyRecord
from tuner.verify.study.shared import (
    FAILED_S,
    SharedStudy,
    StudySnapshot,
    Wanted,
    sampler_value_s,
)

EXCESS: Final = "excess_bytes"

MOST_REPEATS: Final = 16
"""Consecutive proposals without a launch after which the sampler is given up."""

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
        neighbourhood: DecisionSpace[Decision],
        shared: SharedStudy[Decision, AnyRecord],
        *,
        seed: int = 0,
    ) -> None:
        self._neighbourhood = neighbourhood
        self._shared = shared
        self._seeds = neighbourhood.seeds()
        self._seed = seed
        self._sampler = _sampler(seed)
        self._space = {
            "degrees": CategoricalDistribution(tuple(neighbourhood.candidates)),
            "option": CategoricalDistribution(neighbourhood.option_names),
        }
        self._excess_bytes = functools.cache(neighbourhood.excess_bytes)
        self._known: dict[Decision, AnyRecord] = {}
        self._open: tuple[Decision, ...] = ()
        self._smaller: frozenset[tuple[Decision, Scale | None]] = frozenset()
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
            if self._shared.taken_over:
                return self._shared.taken_over.pop(0)
            self._know(seen)
            granted = (self._granted(wish) for wish in requests(seen))
            wanted = next((one for one in granted if one is not None), None)
            if wanted is None:
                return Waiting(open=seen.open) if seen.open else None
            proposal = self._shared.claim(wanted, seen)
            if proposal is not None:
                self._pause_s = FIRST_PAUSE_S
                return proposal
            # Of workers that claim at the same moment, not all shall do so again.
            time.sleep(random.uniform(0.0, FIRST_PAUSE_S))

    def record(self, proposal: Proposal[Decision], record: AnyRecord) -> bool:
        """Store the record of a launch; False if another worker took the trial over."""
        return self._shared.record(proposal, record)

    def running(self) -> frozenset[int]:
        """Return the numbers of the running trials of all workers."""
        return frozenset(proposal.number for proposal in self._shared.look().open)

    def wait(self, waiting: Waiting[Decision], pause: Callable[[float], None] = time.sleep) -> None:
        """Wait for trials of other workers, longer from call to call; print a message once."""
        if self._pause_s == LONGEST_PAUSE_S and not self._has_reported:
            count = len(waiting.open)
            self._shared.on_message(f"waiting for trials of other processes: {count} running")
            self._has_reported = True
        pause(self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, LONGEST_PAUSE_S)

    def _know(self, seen: StudySnapshot[Decision, AnyRecord]) -> None:
        """Remember finished and running trials; scaled-down jobs separately."""
        jobs = [(*one.job, one) for one in seen.records]
        self._known = {decision: one for decision, scale, one in jobs if scale is None}
        self._open = tuple(one.decision for one in seen.open if one.scale is None)
        if self._open:
            # One worker at most claims a number, so no two of them sample alike.
            self._sampler = _sampler(self._seed + seen.num_trials)
        trials = [*(one.job for one in seen.records), *(one.job for one in seen.open)]
        self._smaller = frozenset(job for job in trials if job[1] is not None)

    def _granted(self, wish: LaunchRequest[Decision]) -> Wanted | None:
        if wish.decision is None:
            return self._new()
        if wish.scale is not None:
            is_known = (wish.decision, wish.scale) in self._smaller
        else:
            is_known = wish.decision in self._known
            if wish.decision in self._open or self._neighbourhood.find_point(wish.decision) is None:
                return None
        if is_known and wish.origin != "repeat":
            return None
        return {"decision": wish.decision, "scale": wish.scale, "origin": wish.origin}

    def _new(self) -> Wanted | None:
        """Return a decision that was not launched yet; None if all were."""
        seed = next(filter(self._is_new, self._seeds), None)
        point = seed or self._sampled() or self._fastest_left()
        decision = None if point is None else self._neighbourhood.decision_at(point)
        if point is None or decision is None:
            return None
        return {"decision": decision, "origin": self._origin(point)}

    def _sampled(self) -> Point | None:
        """Return a new point of the sampler; None once it repeats itself."""
        study = optuna.create_study(sampler=self._sampler)
        study.add_trials(filter(None, map(self._sampler_trial, (*self._known, *self._open))))
        for _ in range(MOST_REPEATS):
            trial = study.ask(dict(self._space))
            point = Point(degrees=trial.params["degrees"], option=trial.params["option"])
            decision = self._neighbourhood.decision_at(point)
            if self._is_new(point):
                return point
            if decision is None or decision in self._open:
                study.tell(trial, state=TrialState.FAIL)
            else:
                trial.set_constraint(EXCESS, self._excess_bytes(decision))
                study.tell(trial, self._value_s(decision))
        return None

    def _sampler_trial(self, decision: Decision) -> FrozenTrial | None:
        """Return the trial of a decision, as the sampler sees it."""
        point = self._neighbourhood.find_point(decision)
        if point is None:
            return None
        is_open = decision in self._open
        return optuna.trial.create_trial(
            state=TrialState.RUNNING if is_open else TrialState.COMPLETE,
            value=None if is_open else self._value_s(decision),
            params={"degrees": point.degrees, "option": point.option},
            distributions=dict(self._space),
            constraints={EXCESS: self._excess_bytes(decision)},
        )

    def _value_s(self, decision: Decision) -> float:
        known = self._known.get(decision)
        return FAILED_S if known is None else sampler_value_s(known)

    def _is_new(self, point: Point) -> bool:
        """Whether the decision at the point can be launched, fits and is new."""
        decision = self._neighbourhood.decision_at(point)
        if decision is None or decision in self._known or decision in self._open:
            return False
        return self._excess_bytes(decision) <= 0

    def _fastest_left(self) -> Point | None:
        decisions = self._neighbourhood
        points = [
            Point(degrees=degrees, option=option)
            for degrees in decisions.candidates
            for option in decisions.option_names
        ]
        return min(filter(self._is_new, points), key=decisions.predicted_step_s, default=None)

    def _origin(self, point: Point) -> Origin:
        if point not in self._seeds:
            return "sampler"
        if point.option != PLANNED:
            return "neighbour"
        return "plan" if point == self._seeds[0] else "alternative"


def _sampler(seed: int) -> optuna.samplers.TPESampler:
    with warnings.catch_warnings():
        # The multivariate sampler is still marked experimental in Optuna.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, constant_liar=True, n_startup_trials=4
        )
