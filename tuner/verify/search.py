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

    def _granted(
        self, wish: LaunchRequest[Decision], seen: StudySnapshot[Decision, AnyRecord]
    ) -> Wanted | None:
        if wish.decision is None:
            among = dict.fromkeys(self._points) if wish.among is None else wish.among
            return self._new(among, seen)
        running = [one.decision for one in seen.open]
        if wish.decision in running or wish.decision not in self._points:
            return None
        return {"decision": wish.decision, "scale": wish.scale, "origin": "repeat"}

    def _new(
        self, among: Mapping[Decision, Scale | None], seen: StudySnapshot[Decision, AnyRecord]
    ) -> Wanted | None:
        """Return a decision that was not launched yet, the plan's first; None if all were."""
        records = {one.job: one for one in seen.records}
        running = [one.decision for one in seen.open]
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
