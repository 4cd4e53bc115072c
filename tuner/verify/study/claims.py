"""Trials that are claimed by one worker at a time, and results that count once.

    a trial of the study    running, with a claim: who launches which decision
                            complete, with a record: what the launch gave; never changed again
                            failed: nothing came of it, and its decision is free again

All steps are taken exclusively (store.py). Proposing and claiming are one step, so that no two
workers launch one decision; repeats are claimed like everything else. A result is written onto the
trial, then into the worker's folder, then told; whatever ends the worker between two of these, the
next one to look completes it. A claim whose worker has gone is taken over: the trial goes on here
where its launcher can do that, otherwise it fails. A worker that was only stopped, and whose claim
somebody took, finds its trial ended and drops its result.

A trial that runs without a claim, or under a claim of this worker that this worker does not know
of, was left by a step that was cut short.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, Trial, TrialState
from pydantic import ValidationError

from tuner.errors import StudyError
from tuner.verify.proposal import Proposal
from tuner.verify.records import TrialRecord
from tuner.verify.study.store import Store
from tuner.verify.study.worker import Attendance, Worker

Answer = TypeVar("Answer")

Wanted = Mapping[str, Any]
"""The fields of a proposal without its number."""

CLAIM: Final = "claim"
RECORD: Final = "record"

FAILED_S: Final = 1e9
"""What the sampler is told of a launch that failed: slower than anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What a study knows at one moment."""

    records: tuple[TrialRecord, ...]
    """Of every trial that ended, whoever launched it, by number."""
    open: tuple[Proposal, ...]
    """Trials that are being launched, by whomever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a trial lies in what the study samples; empty where it lies outside."""

    params: Mapping[str, str] = field(default_factory=dict)
    space: Mapping[str, BaseDistribution] = field(default_factory=dict)
    constraints: Mapping[str, float] = field(default_factory=dict)

    def trial(self, **what: Any) -> FrozenTrial:
        """Return a trial that lies there."""
        return optuna.trial.create_trial(
            params=dict(self.params),
            distributions={name: self.space[name] for name in self.params},
            constraints=dict(self.constraints),
            **what,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What happens outside of a study."""

    write: Callable[[TrialRecord], None]
    """Keeps a record in this worker's folder."""
    is_written: Callable[[int], bool]
    """Whether that folder holds the record of a number."""
    adopt: Callable[[Proposal], bool]
    """Whether the trial of a worker that has gone can go on here; ends what is left, if not."""
    told: Callable[[str], None]
    """Hears a line."""


class SharedStudy:
    """A study as one of its workers sees it."""

    def __init__(
        self,
        study: optuna.Study,
        *,
        store: Store,
        worker: Worker,
        sign: Callable[[], None],
        attendance: Attendance,
        outside: Outside,
    ) -> None:
        self.study = study
        self.attendance = attendance
        self.worker = worker
        self.sign = sign
        """Gives a sign of this worker, and notes those of the others."""
        self.records: dict[int, TrialRecord] = {}
        """By number; `look` adds what has ended."""
        self.left_out: frozenset[int] = frozenset()
        """Trials whose records do not count any more."""
        self._store = store
        self.told = outside.told
        self._outside = outside
        self._mine: set[int] = set()
        self.taken_over: tuple[Proposal, ...] = ()
        """Trials of others that go on here, and that `hold` has not seen yet."""

    def exclusively(self, action: Callable[[], Answer]) -> Answer:
        """Run an action while no other worker runs one; it may be run again, see `Store`."""
        return self._store.exclusively(action)

    def look(self) -> Progress:
        """Settle what was left behind, and say how far the study is; exclusively."""
        trials = self.study.get_trials(deepcopy=False)
        running = [trial for trial in trials if trial.state is TrialState.RUNNING]
        self._store.watch(_workers(running))
        # Whoever was stopped shows that it is back before it claims anything.
        self.sign()
        proposals = [self._settled(trial) for trial in running]
        if None in proposals:
            trials = self.study.get_trials(deepcopy=False)
        self.records |= dict(self._ended(trials))
        for token in self.attendance.gone():
            if token != self.worker.token:
                self._store.forget(token)
        return Progress(
            records=tuple(self.records[number] for number in sorted(self.records)),
            open=tuple(one for one in proposals if one is not None),
        )

    def claim(self, wanted: Wanted, place: Place) -> Proposal:
        """Begin a trial under a claim, in one write; exclusively."""
        number = len(self.study.get_trials(deepcopy=False))
        self.study.add_trial(
            place.trial(state=TrialState.RUNNING, user_attrs={CLAIM: self._claim(wanted)})
        )
        return Proposal(number=number, **wanted)

    def take_up(self, proposal: Proposal, place: Place) -> None:
        """Begin a trial anew that goes on here and that the study has lost; exclusively."""
        self._begin_taken(self.claim(proposal.model_dump(exclude={"number"}), place))

    def claim_asked(self, trial: Trial, wanted: Wanted) -> Proposal:
        """Put a claim on a trial that the sampler began; exclusively."""
        trial.set_user_attr(CLAIM, self._claim(wanted))
        return Proposal(number=trial.number, **wanted)

    def hold(self, proposal: Proposal) -> None:
        """Remember a claim, once the step that made it is over."""
        self._mine.add(proposal.number)
        self.taken_over = tuple(one for one in self.taken_over if one != proposal)

    def complete(self, proposal: Proposal, record: TrialRecord) -> bool:
        """Tell a result; False where somebody else took the trial over meanwhile."""

        def told() -> bool:
            trial = self._store.trial(proposal.number)
            if trial.state.is_finished():
                # Ours, if the connection broke after it was told.
                return trial.state is TrialState.COMPLETE and recorded(trial) == record
            claim = trial.user_attrs.get(CLAIM)
            if not isinstance(claim, dict) or claim.get("worker") != self.worker.token:
                return False
            self._store.note(proposal.number, RECORD, record.model_dump(mode="json"))
            self._end(record)
            return True

        counts = self.exclusively(told)
        self._mine.discard(proposal.number)
        if not counts:
            self.told(
                f"trial {proposal.number}: another process took it over while this one gave no"
                " sign; the result here is dropped"
            )
        return counts

    def fail(self, number: int) -> None:
        """End a trial of which nothing came."""
        self.study.tell(number, state=TrialState.FAIL)

    def _claim(self, wanted: Wanted) -> dict[str, Any]:
        proposal = Proposal(number=0, **wanted).model_dump(mode="json", exclude={"number"})
        return {"worker": self.worker.token, "proposal": proposal}

    def _settled(self, trial: FrozenTrial) -> Proposal | None:
        """Return what a running trial launches, after seeing to it that somebody launches it."""
        record = recorded(trial)
        if record is not None:
            self._end(record)
            return None
        claim = trial.user_attrs.get(CLAIM)
        if claim is None:
            self.fail(trial.number)
            return None
        worker, proposal = self._claimed(trial.number, claim)
        if worker == self.worker.token:
            if trial.number in self._mine:
                return proposal
        elif not self.attendance.has_gone(worker):
            return proposal
        elif self._outside.adopt(proposal):
            self._store.note(trial.number, CLAIM, {**claim, "worker": self.worker.token})
            self._begin_taken(proposal)
            return proposal
        self.fail(trial.number)
        return None

    def _begin_taken(self, proposal: Proposal) -> None:
        self._mine.add(proposal.number)
        self.taken_over = (*self.taken_over, proposal)

    def _claimed(self, number: int, claim: Any) -> tuple[str, Proposal]:
        """Return who has a claim, and on what."""
        try:
            proposal = Proposal.model_validate({**claim["proposal"], "number": number})
            return str(claim["worker"]), proposal
        except (ValidationError, LookupError, TypeError) as error:
            raise StudyError(
                f"trial {number} of {self._store.name}: its claim was written by another release of"
                " moetune; use the same one everywhere"
            ) from error

    def _end(self, record: TrialRecord) -> None:
        self._outside.write(record)
        self.study.tell(record.number, told_s(record))

    def _ended(self, trials: Sequence[FrozenTrial]) -> Iterator[tuple[int, TrialRecord]]:
        for trial in trials:
            is_known = trial.number in self.records or trial.number in self.left_out
            if is_known or trial.state is not TrialState.COMPLETE:
                continue
            record = recorded(trial)
            if record is not None:
                # Others write into their own folders.
                if not self._store.is_beside_records:
                    self._outside.write(record)
                yield trial.number, record


def _workers(running: Sequence[FrozenTrial]) -> set[str]:
    claims = (trial.user_attrs.get(CLAIM) for trial in running)
    return {str(claim.get("worker")) for claim in claims if isinstance(claim, dict)}


def told_s(record: TrialRecord) -> float:
    """Return what the sampler is told of a trial, in seconds."""
    return FAILED_S if record.measured_step_s is None else record.measured_step_s


def recorded(trial: FrozenTrial) -> TrialRecord | None:
    """Return the result on a trial; None where there is none yet.

    Raises:
        StudyError: it cannot be read here.
    """
    value = trial.user_attrs.get(RECORD)
    if value is None:
        return None
    try:
        return TrialRecord.model_validate(value)
    except ValidationError as error:
        raise StudyError(
            f"trial {trial.number}: its record was written by another release of moetune; use the"
            " same one everywhere"
        ) from error
