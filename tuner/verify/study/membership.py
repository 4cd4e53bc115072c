"""How a worker comes to a study: it signs on, learns what was done, and signs off at the end.

The study and the files of records in the worker's folder are made to say the same: records that a
study lacks are told to it under their own numbers, records that the folder lacks are written. Where
all workers share the folder and nobody else works, a record that is missing was deleted, to have
its decision launched again.

A study that holds trials, or that another worker is at, is joined when asked to (`--resume`, or a
database that was named). Otherwise it is an error: the user may not know of them.
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

from tuner.errors import PlanUnreadableError, StudyError
from tuner.plan import TrainDecision
from tuner.verify.proposal import Proposal
from tuner.verify.records import TrialRecord
from tuner.verify.study.claims import (
    RECORD,
    Outside,
    Place,
    SharedStudy,
    recorded,
    told_s,
)
from tuner.verify.study.store import Store
from tuner.verify.study.worker import Attendance, Beat, Worker, beating, this_worker

WITHDRAWN: Final = "withdrawn"
"""Attribute of a study: trials whose records were deleted."""

LOOKS_PER_LEASE: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What earlier workers have left in a worker's folder."""

    finished: Sequence[TrialRecord] = ()
    """Trials with a record."""
    under_way: Sequence[Proposal] = ()
    """Trials that may go on without the process that began them."""
    may_go_on: bool = True
    """Whether this worker was asked to go on after all of that."""
    refusal: str = ""
    """What it hears if it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What the study samples, and how."""

    space: Mapping[str, BaseDistribution]
    sampler: BaseSampler
    place_of: Callable[[TrainDecision], Place]
    """Where a decision lies in the space."""

    def place_of_trial(self, trial: TrialRecord | Proposal) -> Place:
        """Return where a trial lies; smaller jobs lie outside."""
        return self.place_of(trial.decision) if trial.scale is None else Place()


@contextmanager
def taking_part(
    store: Store,
    *,
    sampling: Sampling,
    left: Left,
    outside: Outside,
    worker: Worker | None = None,
    attendance: Attendance | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> Iterator[SharedStudy]:
    """Join a study, or begin it, and leave it at the end.

    Args:
        store: where the study lives.
        sampling: what it samples.
        left: in this worker's folder, by earlier ones.
        outside: how what happens outside of the study is done.
        worker: who joins; by default this process.
        attendance: how others are watched.
        pause: waits for some seconds.

    Raises:
        PlanUnreadableError: there are trials already, and going on was not asked for.
        StudyError: the study cannot be reached, is not of this plan or release, or another worker
            is at it and joining was not asked for.
        OutputError: the folder cannot be written.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    me = worker or this_worker()
    others = attendance or Attendance()

    is_alone = partial(_is_alone, store, me, others, pause=pause)

    def opened() -> optuna.Study:
        # In turn, so that of two that begin at once the second one sees the first.
        if not left.may_go_on and not is_alone():
            raise StudyError(
                f"another `moetune verify` is at work on {store.name}; add --resume to join it, or"
                " wait for it"
            )
        study = store.opened(space=sampling.space, sampler=sampling.sampler, is_alone=is_alone)
        sign()
        return study

    counts = itertools.count()

    def beat() -> None:
        seen = store.beat(Beat(worker=me, count=next(counts)))
        if seen is not None:
            others.look(seen)

    def sign() -> None:
        beat()
        # Asked for even where the beat failed: whoever is not seen counts as gone.
        seen = store.beats()
        others.look(seen)
        if me.token not in seen:
            raise StudyError(f"cannot sign on to {store.name}: is the disk full?")

    try:
        study = store.exclusively(opened)
        with beating(beat, lease_s=others.lease_s):
            if (left.finished or left.under_way) and not left.may_go_on:
                raise PlanUnreadableError(left.refusal)
            shared = SharedStudy(
                study, store=store, worker=me, sign=sign, attendance=others, outside=outside
            )
            shared.exclusively(lambda: _reconcile(shared, store, sampling, left, outside))
            if others.present(but=me):
                # Two workers with one seed would propose the same.
                study.sampler.reseed_rng()
            yield shared
    finally:
        store.leave(me.token)


def _is_alone(
    store: Store, me: Worker, others: Attendance, *, pause: Callable[[float], None]
) -> bool:
    """Wait until it is known whether anybody else is at work."""
    others.look(store.beats())
    while present := others.present(but=me):
        if any(others.is_seen(one) for one in present):
            return False
        pause(others.lease_s / LOOKS_PER_LEASE)
        others.look(store.beats())
    return True


def _reconcile(
    shared: SharedStudy, store: Store, sampling: Sampling, left: Left, outside: Outside
) -> None:
    """Make the study and the folder say the same."""
    shared.sign()
    study = shared.study
    files = {record.number: record for record in left.finished}
    told = study.get_trials(deepcopy=False)
    for number, record in sorted(files.items()):
        if number < len(told):
            _meet(shared, store, told[number], record)
    jobs = {proposal.number: proposal for proposal in left.under_way}
    for number in range(len(told), 1 + max((*files, *jobs), default=-1)):
        if number in files:
            record = files[number]
            study.add_trial(
                sampling.place_of_trial(record).trial(
                    value=told_s(record), user_attrs={RECORD: record.model_dump(mode="json")}
                )
            )
        elif number in jobs and outside.adopt(jobs[number]):
            shared.take_up(jobs[number], sampling.place_of_trial(jobs[number]))
        else:
            study.add_trial(optuna.trial.create_trial(state=TrialState.FAIL))
    _withdraw(shared, store, told, outside, files=files)
    shared.look()
    for number, record in shared.records.items():
        if number not in files:
            outside.write(record)


def _meet(shared: SharedStudy, store: Store, trial: FrozenTrial, record: TrialRecord) -> None:
    """See to it that a record in the folder counts."""
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
        # The file was changed, or the study was begun anew without it; files are the truth here.
        shared.records[record.number] = record


def _withdraw(
    shared: SharedStudy,
    store: Store,
    told: Sequence[FrozenTrial],
    outside: Outside,
    *,
    files: Mapping[int, TrialRecord],
) -> None:
    """Leave out trials whose records were deleted, now and before."""
    gone: set[int] = set(shared.study.user_attrs.get(WITHDRAWN, ()))
    is_shared = bool(shared.attendance.present(but=shared.worker))
    if store.is_beside_records and not is_shared:
        ended = [one.number for one in told if one.state is TrialState.COMPLETE]
        recorded = [one for one in ended if RECORD in told[one].user_attrs]
        # Asked for one by one: a listing, on NFS, may be older than a record.
        lost = {one for one in recorded if one not in files and not outside.is_written(one)}
        if lost - gone:
            shared.study.set_user_attr(WITHDRAWN, sorted(gone | lost))
        gone |= lost
    shared.left_out = frozenset(gone)
