"""Chooses the next decision to launch: the plan's own, then what Optuna's sampler proposes.

The sampler (tuner/verify/steering.py) starts from the model's predictions and learns from launches.
It works on a copy of the study in memory, with the trials that ended and those that run.

The search is over decisions of one kind. A space of another kind implements
`space.DecisionSpace`, its records extend `records.LaunchRecord`, and both are named where
the study is joined (`study.shared.TrialKind`).

study/ holds how the study is stored, how several processes share it, and what becomes of the trials
of a process that died. The loop is the caller's: propose, launch, record.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic

import optuna
from optuna.trial import FrozenTrial, TrialState

from tuner.verify.budget.scale import Scale
from tuner.verify.proposal import Decision, LaunchRequest, Proposal
from tuner.verify.records import AnyRecord
from tuner.verify.space import DecisionSpace
from tuner.verify.steering import METRICS, POINT, PriorSampler
from tuner.verify.study.shared import (
    SharedStudy,
    StudySnapshot,
    Wanted,
    sampler_value_s,
)

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
        self._known: dict[Decision, AnyRecord] = {}
        self._open: tuple[Decision, ...] = ()
        self._smaller: dict[tuple[Decision, Scale | None], AnyRecord] = {}
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
            self._know(seen)
            granted = (self._granted(wish) for wish in requests(seen))
            wanted = next((one for one in granted if one is not None), None)
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

    def _know(self, seen: StudySnapshot[Decision, AnyRecord]) -> None:
        """Remember finished and running trials; scaled-down jobs separately."""
        self._smaller = {one.job: one for one in seen.records if one.job[1] is not None}
        self._known = {one.decision: one for one in seen.records if one.job[1] is None}
        self._open = tuple(one.decision for one in seen.open)

    def _granted(self, wish: LaunchRequest[Decision]) -> Wanted | None:
        if wish.decision is None:
            return self._new(dict.fromkeys(self._points) if wish.among is None else wish.among)
        if wish.decision in self._open or wish.decision not in self._points:
            return None
        return {"decision": wish.decision, "scale": wish.scale, "origin": "repeat"}

    def _new(self, among: Mapping[Decision, Scale | None]) -> Wanted | None:
        """Return a decision that was not launched yet, the plan's first; None if all were."""
        decisions = tuple(self._points)
        trials = [self._trial(place, one, among) for place, one in enumerate(decisions)]
        if None not in trials:
            return None
        if trials[0] is None:
            return {"decision": decisions[0], "scale": among[decisions[0]], "origin": "plan"}
        study = optuna.create_study(sampler=self._sampler)
        study.add_trials([trial for trial in trials if trial is not None])
        decision = decisions[study.ask(self._sampler.space).params[POINT]]
        return {"decision": decision, "scale": among[decision], "origin": "sampler"}

    def _trial(
        self, place: int, decision: Decision, among: Mapping[Decision, Scale | None]
    ) -> FrozenTrial | None:
        """Return the trial of a decision, as the sampler sees it; None if it may be launched."""
        known = self._known.get(decision)
        if known is None and among.get(decision) is not None:
            known = self._smaller.get((decision, among[decision]))
        if known is None and decision not in self._open and decision in among:
            return None
        unknown = TrialState.RUNNING if decision in self._open else TrialState.FAIL
        return optuna.trial.create_trial(
            state=unknown if known is None else TrialState.COMPLETE,
            value=None if known is None else sampler_value_s(known),
            params={POINT: place},
            distributions=self._sampler.space,
            user_attrs={} if known is None else {METRICS: self._measured(known)},
        )
