"""A study that several workers share: a trial is launched by one of them, and counts once.

    a trial of the study    running, with a claim (what is launched) and a lease (by whom)
                            complete, with a record: the result; never changed again
                            failed: no result, and its decision is free again

Nothing is locked between transactions. A worker claims by adding a trial: its number says whether
another one was added since the worker looked, and then it fails its own and looks again. A result
is written to the trial, the trial is completed, and then the record goes into the worker's folder;
what a worker did not do before it died, the next one does. The trial of a dead worker fails. The
database lets a trial end once: a suspended worker whose trial was failed meanwhile finds it so, and
drops its result.

`Study.optimize` would not do: it asks its sampler for each trial, while retries, budgets and other
workers decide here what is next; and Optuna's heartbeats never fail a trial whose worker died
before the first one.

A lease says which worker runs a trial, and whether it still does: it holds the worker and a counter
that the worker increments every few seconds. Clocks of different machines are not compared: a lease
has ended once it has not changed for `LEASE_S`, measured by the observer. Earlier: if its worker
has left, or ran in the same place (same boot of the machine, same PID namespace) and its process no
longer exists.

Time without polling counts as one polling interval, so workers that were suspended together (a
suspended job, say) do not take each other for dead when they resume.
"""

import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar

import optuna
from optuna.trial import FrozenTrial, TrialState
from pydantic import Field, ValidationError

from profilers.records import Record
from profilers.steps.config import Size
from tuner.config.train import TrainDecision
from tuner.errors import PlanUnreadableError, StudyError, TunerError
from tuner.verify.records import AnyRecord, Decision, LaunchRecord, Proposal, TrialRecord
from tuner.verify.study.database import StudyDatabase

LEASE_S: Final = 60.0
"""Seconds that a lease may go without renewal; several times the delay of a shared file system."""

RENEWALS_PER_LEASE: Final = 6

WORKER_TOKEN: Final = re.compile(r"[0-9a-f]{32}")

Text = Annotated[str, Field(max_length=300)]


class Worker(Record):
    """A process that works on a study."""

    token: Annotated[str, Field(pattern=rf"^{WORKER_TOKEN.pattern}$")]
    place: Text
    """Boot id of the machine and PID namespace; empty if unknown."""
    pid: int
    started: int
    """Start in clock ticks after boot; process ids are reused."""


class Lease(Record):
    """A worker's right to a running trial."""

    worker: Worker | None = None
    """The worker that runs the trial; None: it has left."""
    renewals: Size = 0


def this_worker() -> Worker:
    """Describe this process, with a unique token."""
    return Worker(
        token=secrets.token_hex(16),
        place=_place(),
        pid=os.getpid(),
        started=_started(os.getpid()) or 0,
    )


def process_has_gone(worker: Worker) -> bool:
    """Return whether a worker's process is known here to have ended."""
    return (
        bool(worker.place) and worker.place == _place() and _started(worker.pid) != worker.started
    )


class LeaseWatch:
    """The leases of a study's running trials, as observed by one worker."""

    def __init__(self, *, lease_s: float = LEASE_S, now_s: Callable[[], float] = time.monotonic):
        """Start observing; every lease counts as just renewed at first."""
        self.lease_s = lease_s
        self._now_s = now_s
        self._guard = threading.Lock()
        self._observed_s = now_s()
        self._leases: Mapping[int, Lease] = {}
        self._still_s: dict[int, float] = {}

    def observe(self, leases: Mapping[int, Lease]) -> None:
        """Compare the leases of all running trials, by number, with those of the last call."""
        with self._guard:
            now_s = self._now_s()
            passed_s = min(now_s - self._observed_s, 2.0 * self.lease_s / RENEWALS_PER_LEASE)
            self._still_s = {
                number: self._still_s[number] + passed_s
                if self._leases.get(number) == lease
                else 0.0
                for number, lease in leases.items()
            }
            self._observed_s, self._leases = now_s, dict(leases)

    def has_ended(self, number: int, lease: Lease) -> bool:
        """Return whether a trial's worker has left, ended, or not renewed its lease in time."""
        if lease.worker is None or self._still_s.get(number, 0.0) > self.lease_s:
            return True
        return process_has_gone(lease.worker)


@contextmanager
def renewal_thread(renew: Callable[[], None], *, lease_s: float) -> Iterator[None]:
    """Call `renew` several times per lease, in a thread, until this is left."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(lease_s / RENEWALS_PER_LEASE):
            renew()

    thread = threading.Thread(target=go_on, name="renewal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _place() -> str:
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    return ""


def _started(pid: int) -> int | None:
    """Return a process's start in ticks after boot; None if it has ended.

    Source: proc_pid_stat(5), fields 3 and 22; a name may contain spaces and brackets.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    return None


Stored = TypeVar("Stored", bound=Record)

Wanted = Mapping[str, Any]
"""The fields of a proposal without its number."""

CLAIM: Final = "claim"
LEASE: Final = "lease"
RECORD: Final = "record"

MOST_TRIALS: Final = 10_000
"""Trials of a study; numbers of a damaged record are larger."""

FAILED_S: Final = 1e9
"""Value of a failed launch: slower than anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialKind(Generic[Decision, AnyRecord]):
    """The kind of decision of a study: what its tables hold."""

    proposal: type[Proposal[Decision]]
    record: type[AnyRecord]


TRAINING: Final = TrialKind(proposal=Proposal[TrainDecision], record=TrialRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySnapshot(Generic[Decision, AnyRecord]):
    """A worker's snapshot of a study."""

    records: tuple[AnyRecord, ...]
    """Records of all finished trials of all workers, by number."""
    open: tuple[Proposal[Decision], ...]
    """Running trials of any worker."""
    num_trials: int = 0
    """Trials in any state; the number of the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyCallbacks(Generic[AnyRecord]):
    """Side effects outside of a study."""

    write: Callable[[AnyRecord], None]
    """Callback that writes record and log of a trial that this worker ran into its folder."""
    copy: Callable[[AnyRecord], None]
    """Callback that writes another worker's record into this worker's folder if it is not there."""
    on_message: Callable[[str], None]
    """Callback that gets messages for the user."""


class SharedStudy(Generic[Decision, AnyRecord]):
    """A shared study, from the view of one worker."""

    def __init__(
        self,
        database: StudyDatabase,
        *,
        kind: TrialKind[Decision, AnyRecord],
        outside: StudyCallbacks[AnyRecord],
        worker: Worker,
        watch: LeaseWatch,
    ) -> None:
        self.records: dict[int, AnyRecord] = {}
        """Finished trials' records by number; `look` adds to them."""
        self.on_message = outside.on_message
        self._database = database
        self._kind = kind
        self._outside = outside
        self._worker = worker
        self._watch = watch
        self._mine: set[int] = set()

    def look(self) -> StudySnapshot[Decision, AnyRecord]:
        """Fail trials of dead workers, and return the progress."""
        return self._database.persist(self._look)

    def claim(
        self, wanted: Wanted, seen: StudySnapshot[Decision, AnyRecord]
    ) -> Proposal[Decision] | None:
        """Start a trial; None if another worker has started one since the snapshot."""
        proposal = self._kind.proposal(number=seen.num_trials, **wanted)
        attributes = {
            CLAIM: proposal.model_dump(mode="json", exclude={"number"}),
            LEASE: Lease(worker=self._worker).model_dump(mode="json"),
        }
        trial = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs=attributes)

        def claimed() -> bool:
            number = self._database.add(trial)
            if number == proposal.number:
                self._mine.add(number)
                return True
            self._database.fail(number)
            return False

        return proposal if self._database.persist(claimed) else None

    def record(self, proposal: Proposal[Decision], record: AnyRecord) -> bool:
        """Store a result; False if another worker has taken the trial over."""
        number = proposal.number

        def stored() -> bool:
            what = {RECORD: record.model_dump(mode="json")}
            if self._database.complete(number, sampler_value_s(record), **what):
                return True
            # Ours, if the connection broke after it was stored.
            trial = self._database.trials()[number]
            return trial.state is TrialState.COMPLETE and self._recorded(trial) == record

        counts = self._database.persist(stored)
        self._mine.discard(number)
        if counts:
            self.records[number] = record
            self._outside.write(record)
        else:
            self.on_message(
                f"trial {number}: another process took it over while this one did not renew its"
                " lease; the result here is dropped"
            )
        return counts

    def renew(self) -> None:
        """Renew the leases of this worker, and observe those of the others."""
        # Tried again in some seconds; whatever is wrong, the main thread meets it, too.
        with contextlib.suppress(TunerError):
            self._database.persist(self._renew, once=True)

    def leave(self) -> None:
        """Give the running trials of this worker up, so that others need not wait for its lease."""

        def left() -> None:
            for trial in self._running():
                if trial.number in self._mine:
                    self._lease(trial.number, Lease())

        with contextlib.suppress(TunerError):
            self._database.persist(left, once=True)

    def _look(self) -> StudySnapshot[Decision, AnyRecord]:
        for trial in self._renew():
            self._settle(trial)
        # Read at once, so that the number of trials vouches for all that is said about them.
        trials = self._database.trials()
        for trial in trials:
            if trial.number not in self.records and trial.state is TrialState.COMPLETE:
                record = self._recorded(trial)
                if record is None:
                    continue
                self.records[trial.number] = record
                self._outside.copy(record)
        return StudySnapshot(
            records=tuple(self.records[number] for number in sorted(self.records)),
            open=tuple(
                self._claimed(open_trial)
                for open_trial in trials
                if open_trial.state is TrialState.RUNNING
            ),
            num_trials=len(trials),
        )

    def _renew(self) -> list[FrozenTrial]:
        running = self._running()
        for trial in running:
            if trial.number in self._mine:
                renewals = _lease(trial).renewals + 1
                self._lease(trial.number, Lease(worker=self._worker, renewals=renewals))
        self._watch.observe({trial.number: _lease(trial) for trial in running})
        return running

    def _running(self) -> list[FrozenTrial]:
        return [trial for trial in self._database.trials() if trial.state is TrialState.RUNNING]

    def _settle(self, trial: FrozenTrial) -> None:
        """End a running trial if its worker is dead."""
        lease, number = _lease(trial), trial.number
        # A lease is this worker's own if the connection broke after a claim.
        is_dead = lease.worker == self._worker or self._watch.has_ended(number, lease)
        if number in self._mine or not is_dead:
            return
        record = self._recorded(trial)
        if record is not None:
            self._database.complete(number, sampler_value_s(record))
        else:
            self._database.fail(number)

    def _lease(self, number: int, lease: Lease) -> None:
        """Note whose a running trial is."""
        self._database.note(number, LEASE, lease.model_dump(mode="json"))

    def _recorded(self, trial: FrozenTrial) -> AnyRecord | None:
        """Return the record of a trial; None if there is none yet."""
        if RECORD not in trial.user_attrs:
            return None
        return _stored(trial, RECORD, self._kind.record, number=trial.number)

    def _claimed(self, trial: FrozenTrial) -> Proposal[Decision]:
        return _stored(trial, CLAIM, self._kind.proposal, number=trial.number)


@contextmanager
def join_workers(
    database: StudyDatabase,
    *,
    kind: TrialKind[Decision, AnyRecord],
    finished: Sequence[AnyRecord],
    outside: StudyCallbacks[AnyRecord],
    may_join: bool = True,
    worker: Worker | None = None,
    watch: LeaseWatch | None = None,
) -> Iterator[SharedStudy[Decision, AnyRecord]]:
    """Work on a study, and leave it at the end.

    Args:
        database: that holds the study; closed at the end.
        kind: of decision.
        finished: records in this worker's folder.
        outside: side effects outside of the study.
        may_join: whether other workers may be at work; otherwise they are an error.
        worker: that joins; by default this process.
        watch: of the leases of the other workers.

    Raises:
        PlanUnreadableError: the folder holds records of another study.
        StudyError: the study cannot be reached, or another worker runs and may not be joined.
        OutputError: the folder or the file cannot be written.
    """
    watch = watch or LeaseWatch()
    shared = SharedStudy(
        database, kind=kind, outside=outside, worker=worker or this_worker(), watch=watch
    )
    place = database.place
    with contextlib.closing(database):
        try:
            seen = shared.look()
            for record in finished:
                if shared.records.get(record.number) != record:
                    raise PlanUnreadableError(
                        f"trial {record.number} in the plan's folder is not trial {record.number}"
                        f" of the study in {place.name}: {place.remedy}"
                    )
            if seen.open and not may_join:
                raise StudyError(
                    f"another `moetune verify` is at work on {place.name}; add --resume to join it,"
                    " or wait for it"
                )
            with renewal_thread(shared.renew, lease_s=watch.lease_s):
                yield shared
        finally:
            shared.leave()


def former_trials(finished: Sequence[LaunchRecord[Any]]) -> tuple[FrozenTrial, ...]:
    """Return the trials that a new study begins with, by number, from the records in a folder.

    Raises:
        PlanUnreadableError: a number is beyond those of any study.
    """
    records = {record.number: record for record in finished}
    last = max(records, default=-1)
    if last >= MOST_TRIALS:
        raise PlanUnreadableError(
            f"a trial has the number {last}, and a study holds {MOST_TRIALS:,} trials: move its"
            " record away and go on with --resume"
        )
    return tuple(_former(records.get(number)) for number in range(last + 1))


def _former(record: LaunchRecord[Any] | None) -> FrozenTrial:
    if record is None:
        return optuna.trial.create_trial(state=TrialState.FAIL)
    attributes = {RECORD: record.model_dump(mode="json")}
    return optuna.trial.create_trial(value=sampler_value_s(record), user_attrs=attributes)


def sampler_value_s(record: LaunchRecord[Any]) -> float:
    """Return a trial's value for the sampler, in seconds of a step where it trains."""
    return FAILED_S if record.sampled_value is None else record.sampled_value


def _lease(trial: FrozenTrial) -> Lease:
    return _stored(trial, LEASE, Lease)


def _stored(trial: FrozenTrial, name: str, kind: type[Stored], **fields: object) -> Stored:
    try:
        return kind.model_validate({**trial.user_attrs[name], **fields})
    except (ValidationError, LookupError, TypeError) as error:
        raise StudyError(
            f"trial {trial.number} of the study: its {name} was written by another release of"
            " moetune; use the same one everywhere"
        ) from error
