"""Exclusive claims of trials, and results that count once.

    a trial of the study    running, with a claim: which worker launches which decision
                            complete, with a record: the result; never changed again
                            failed: no result, and its decision is free again

All steps are exclusive (store.py). Proposing and claiming are one step, so no two workers launch
the same decision; repeats are claimed likewise. A result is written to the trial, then to the
worker's folder, then told to Optuna; if the worker dies in between, the next worker completes it. A
claim of a dead worker is taken over: the trial continues here if its launcher supports that,
otherwise it fails. A suspended worker whose claim was taken over finds its trial ended and drops
its result.

A running trial without a claim, or with a claim of this worker that it does not know of, was left
by an interrupted step.
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

Result = TypeVar("Result")

Wanted = Mapping[str, Any]
"""The fields of a proposal without its number."""

CLAIM: Final = "claim"
RECORD: Final = "record"

FAILED_S: Final = 1e9
"""Value of a failed launch for the sampler: slower than anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySnapshot:
    """Snapshot of a study."""

    records: tuple[TrialRecord, ...]
    """Of every finished trial, of any worker, by number."""
    open: tuple[Proposal, ...]
    """Running trials of any worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePoint:
    """A trial's point in the sampler's search space; empty if it is outside."""

    params: Mapping[str, str] = field(default_factory=dict)
    space: Mapping[str, BaseDistribution] = field(default_factory=dict)
    constraints: Mapping[str, float] = field(default_factory=dict)

    def trial(self, **what: Any) -> FrozenTrial:
        """Return a trial at this point."""
        return optuna.trial.create_trial(
            params=dict(self.params),
            distributions={name: self.space[name] for name in self.params},
            constraints=dict(self.constraints),
            **what,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyCallbacks:
    """Side effects outside of a study."""

    write: Callable[[TrialRecord], None]
    """Writes a record into this worker's folder."""
    is_written: Callable[[int], bool]
    """Whether that folder has the record of a trial number."""
    adopt: Callable[[Proposal], bool]
    """Whether the trial of a dead worker can continue here; ends its leftovers if not."""
    on_message: Callable[[str], None]
    """Gets messages for the user."""


class SharedStudy:
    """A shared study, from the view of one worker."""

    def __init__(
        self,
        study: optuna.Study,
        *,
        store: Store,
        worker: Worker,
        sign: Callable[[], None],
        attendance: Attendance,
        outside: StudyCallbacks,
    ) -> None:
        self.study = study
        self.attendance = attendance
        self.worker = worker
        self.sign = sign
        """Sends a heartbeat of this worker, and reads those of the others."""
        self.records: dict[int, TrialRecord] = {}
        """By number; `look` adds finished trials."""
        self.left_out: frozenset[int] = frozenset()
        """Trials whose records are withdrawn."""
        self._store = store
        self.on_message = outside.on_message
        self._outside = outside
        self._mine: set[int] = set()
        self.taken_over: tuple[Proposal, ...] = ()
        """Trials of dead workers that continue here and are not yet held."""

    def exclusively(self, action: Callable[[], Result]) -> Result:
        """Run an action exclusively; it may be retried, see `Store`."""
        return self._store.exclusively(action)

    def look(self) -> StudySnapshot:
        """Settle trials of dead workers, and return the progress; exclusively."""
        trials = self.study.get_trials(deepcopy=False)
        running = [trial for trial in trials if trial.state is TrialState.RUNNING]
        self._store.watch(_workers(running))
        # A worker that was suspended sends a heartbeat before it claims anything.
        self.sign()
        proposals = [self._settled(trial) for trial in running]
        if None in proposals:
            trials = self.study.get_trials(deepcopy=False)
        self.records |= dict(self._ended(trials))
        for token in self.attendance.gone():
            if token != self.worker.token:
                self._store.forget(token)
        return StudySnapshot(
            records=tuple(self.records[number] for number in sorted(self.records)),
            open=tuple(one for one in proposals if one is not None),
        )

    def claim(self, wanted: Wanted, place: SamplePoint) -> Proposal:
        """Start a trial with a claim, in one write; exclusively."""
        number = len(self.study.get_trials(deepcopy=False))
        self.study.add_trial(
            place.trial(state=TrialState.RUNNING, user_attrs={CLAIM: self._claim(wanted)})
        )
        return Proposal(number=number, **wanted)

    def take_up(self, proposal: Proposal, place: SamplePoint) -> None:
        """Re-create a trial that continues here and is missing in the study; exclusively."""
        self._begin_taken(self.claim(proposal.model_dump(exclude={"number"}), place))

    def claim_sampled(self, trial: Trial, wanted: Wanted) -> Proposal:
        """Claim a trial that the sampler proposed; exclusively."""
        trial.set_user_attr(CLAIM, self._claim(wanted))
        return Proposal(number=trial.number, **wanted)

    def hold(self, proposal: Proposal) -> None:
        """Remember a claim, once its exclusive step is over."""
        self._mine.add(proposal.number)
        self.taken_over = tuple(one for one in self.taken_over if one != proposal)

    def complete(self, proposal: Proposal, record: TrialRecord) -> bool:
        """Store a result; False if another worker has taken the trial over."""

        def store_result() -> bool:
            trial = self._store.trial(proposal.number)
            if trial.state.is_finished():
                # Ours, if the connection broke after it was stored.
                return trial.state is TrialState.COMPLETE and recorded(trial) == record
            claim = trial.user_attrs.get(CLAIM)
            if not isinstance(claim, dict) or claim.get("worker") != self.worker.token:
                return False
            self._store.note(proposal.number, RECORD, record.model_dump(mode="json"))
            self._end(record)
            return True

        counts = self.exclusively(store_result)
        self._mine.discard(proposal.number)
        if not counts:
            self.on_message(
                f"trial {proposal.number}: another process took it over while this one sent no"
                " heartbeat; the result here is dropped"
            )
        return counts

    def fail(self, number: int) -> None:
        """Mark a trial without a result as failed."""
        self.study.tell(number, state=TrialState.FAIL)

    def _claim(self, wanted: Wanted) -> dict[str, Any]:
        proposal = Proposal(number=0, **wanted).model_dump(mode="json", exclude={"number"})
        return {"worker": self.worker.token, "proposal": proposal}

    def _settled(self, trial: FrozenTrial) -> Proposal | None:
        """Return the proposal of a running trial, settling it if its worker is dead."""
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
        """Return the worker and the proposal of a claim."""
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
        self.study.tell(record.number, sampler_value_s(record))

    def _ended(self, trials: Sequence[FrozenTrial]) -> Iterator[tuple[int, TrialRecord]]:
        for trial in trials:
            is_known = trial.number in self.records or trial.number in self.left_out
            if is_known or trial.state is not TrialState.COMPLETE:
                continue
            record = recorded(trial)
            if record is not None:
                # Other workers write into their own folders.
                if not self._store.is_beside_records:
                    self._outside.write(record)
                yield trial.number, record


def _workers(running: Sequence[FrozenTrial]) -> set[str]:
    claims = (trial.user_attrs.get(CLAIM) for trial in running)
    return {str(claim.get("worker")) for claim in claims if isinstance(claim, dict)}


def sampler_value_s(record: TrialRecord) -> float:
    """Return a trial's value for the sampler, in seconds."""
    return FAILED_S if record.measured_step_s is None else record.measured_step_s


def recorded(trial: FrozenTrial) -> TrialRecord | None:
    """Return the record of a trial; None if there is none yet.

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
