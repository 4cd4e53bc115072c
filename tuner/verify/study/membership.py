"""Joining a study: a worker registers, synchronises records, and leaves at the end.

The study and the record files in the worker's folder are synchronised: records that the study lacks
are added under their own numbers, records that the folder lacks are written. If all workers share
the folder and no other runs, a missing record was deleted so that its decision is launched again.

A study with trials or running workers is joined on request only (`--resume`, or a named database).
Otherwise it is an error: the user may not know of them.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from tuner.config.train import TrainDecision
from tuner.errors import PlanUnreadableError, StudyError
from tuner.verify.proposal import Proposal
from tuner.verify.records import TrialRecord
from tuner.verify.study.claims import (
    RECORD,
    SamplePoint,
    SharedStudy,
    StudyCallbacks,
    recorded,
    sampler_value_s,
)
from tuner.verify.study.store import Store
from tuner.verify.study.worker import (
    Attendance,
    Worker,
    WorkerHeartbeat,
    heartbeat_thread,
    this_worker,
)

WITHDRAWN: Final = "withdrawn"
"""Attribute of a study: trials whose records were deleted."""

POLLS_PER_LEASE: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTrials:
    """Trials of earlier workers in a worker's folder."""

    finished: Sequence[TrialRecord] = ()
    """Trials with a record."""
    running: Sequence[Proposal] = ()
    """Trials that may have outlived their process."""
    may_go_on: bool = True
    """Whether this worker may resume after them."""
    refusal: str = ""
    """Error message if it may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The search space of the study and its sampler."""

    space: Mapping[str, BaseDistribution]
    sampler: BaseSampler
    sample_point: Callable[[TrainDecision], SamplePoint]
    """The point of a decision in the space."""

    def trial_sample_point(self, trial: TrialRecord | Proposal) -> SamplePoint:
        """Return the point of a trial; scaled-down jobs have none."""
        return self.sample_point(trial.decision) if trial.scale is None else SamplePoint()


@contextmanager
def join_workers(
    store: Store,
    *,
    sampling: Sampling,
    left: EarlierTrials,
    outside: StudyCallbacks,
    worker: Worker | None = None,
    attendance: Attendance | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[SharedStudy]:
    """Join or create a study, and leave it at the end.

    Args:
        store: of the study.
        sampling: search space and sampler.
        left: trials of earlier workers in this worker's folder.
        outside: side effects outside of the study.
        worker: that joins; by default this process.
        attendance: of the other workers.
        pause: sleeps for some seconds.

    Raises:
        PlanUnreadableError: there are trials already, and resuming was not requested.
        StudyError: the study cannot be reached, is not of this plan or release, or another worker
            runs and joining was not requested.
        OutputError: the folder cannot be written.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    me = worker or this_worker()
    others = attendance or Attendance()

    is_only_worker = partial(_is_only_worker, store, me, others, pause=pause)

    def opened() -> optuna.Study:
        # Exclusively, so that of two simultaneous starts the second sees the first.
        if not left.may_go_on and not is_only_worker():
            raise StudyError(
                f"another `moetune verify` is at work on {store.name}; add --resume to join it, or"
                " wait for it"
            )
        study = store.opened(
            space=sampling.space, sampler=sampling.sampler, is_only_worker=is_only_worker
        )
        sign()
        return study

    counts = itertools.count()

    def heartbeat() -> None:
        seen = store.heartbeat(WorkerHeartbeat(worker=me, count=next(counts)))
        if seen is not None:
            others.look(seen)

    def sign() -> None:
        heartbeat()
        # Read even if the heartbeat failed: an unseen worker counts as gone.
        seen = store.heartbeats()
        others.look(seen)
        if me.token not in seen:
            raise StudyError(f"cannot register with {store.name}: is the disk full?")

    try:
        study = store.exclusively(opened)
        with heartbeat_thread(heartbeat, lease_s=others.lease_s):
            if (left.finished or left.running) and not left.may_go_on:
                raise PlanUnreadableError(left.refusal)
            shared = SharedStudy(
                study, store=store, worker=me, sign=sign, attendance=others, outside=outside
            )
            shared.exclusively(lambda: _reconcile(shared, store, sampling, left, outside))
            if others.present(but=me):
                # Workers with equal seeds would propose the same decisions.
                study.sampler.reseed_rng()
            yield shared
    finally:
        store.leave(me.token)


def _is_only_worker(
    store: Store, me: Worker, others: Attendance, *, pause: Callable[[float], None]
) -> bool:
    """Wait until it is known whether any other worker runs."""
    others.look(store.heartbeats())
    while present := others.present(but=me):
        if any(others.is_seen(one) for one in present):
            return False
        pause(others.lease_s / POLLS_PER_LEASE)
        others.look(store.heartbeats())
    return True


def _reconcile(
    shared: SharedStudy,
    store: Store,
    sampling: Sampling,
    left: EarlierTrials,
    outside: StudyCallbacks,
) -> None:
    """Synchronise the study and the folder."""
    shared.sign()
    study = shared.study
    files = {record.number: record for record in left.finished}
    stored_trials = study.get_trials(deepcopy=False)
    for number, record in sorted(files.items()):
        if number < len(stored_trials):
            _meet(shared, store, stored_trials[number], record)
    jobs = {proposal.number: proposal for proposal in left.running}
    for number in range(len(stored_trials), 1 + max((*files, *jobs), default=-1)):
        if number in files:
            record = files[number]
            study.add_trial(
                sampling.trial_sample_point(record).trial(
                    value=sampler_value_s(record),
                    user_attrs={RECORD: record.model_dump(mode="json")},
                )
            )
        elif number in jobs and outside.adopt(jobs[number]):
            shared.take_up(jobs[number], sampling.trial_sample_point(jobs[number]))
        else:
            study.add_trial(optuna.trial.create_trial(state=TrialState.FAIL))
    _withdraw(shared, store, stored_trials, outside, files=files)
    shared.look()
    for number, record in shared.records.items():
        if number not in files:
            outside.write(record)


def _meet(shared: SharedStudy, store: Store, trial: FrozenTrial, record: TrialRecord) -> None:
    """Make a record in the folder count in the study."""
    if recorded(trial) == record:
        return
    if not store.is_beside_records:
        raise PlanUnreadableError(
            f"trial {record.number} in the plan's folder is not trial {record.number} of the study"
            f" in {store.name}: move the folder of trials away to join that study"
        )
    if trial.state is TrialState.RUNNING:
        store.note(record.number, RECORD, record.model_dump(mode="json"))
    elif trial.number not in shared.records:
        # The file was edited, or the study re-created without it; files take precedence.
        shared.records[record.number] = record


def _withdraw(
    shared: SharedStudy,
    store: Store,
    stored_trials: Sequence[FrozenTrial],
    outside: StudyCallbacks,
    *,
    files: Mapping[int, TrialRecord],
) -> None:
    """Exclude trials whose records were deleted, now or earlier."""
    gone: set[int] = set(shared.study.user_attrs.get(WITHDRAWN, ()))
    is_shared = bool(shared.attendance.present(but=shared.worker))
    if store.is_beside_records and not is_shared:
        ended = [one.number for one in stored_trials if one.state is TrialState.COMPLETE]
        recorded = [one for one in ended if RECORD in stored_trials[one].user_attrs]
        # Checked one by one: on NFS a listing may be older than a record.
        lost = {one for one in recorded if one not in files and not outside.is_written(one)}
        if lost - gone:
            shared.study.set_user_attr(WITHDRAWN, sorted(gone | lost))
        gone |= lost
    shared.left_out = frozenset(gone)
