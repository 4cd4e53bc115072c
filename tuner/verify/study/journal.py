"""A study in a journal file, for workers on one node or on a shared file system.

    trials/study.journal         Optuna's journal, line by line
    trials/study.journal.lock    held while a line is appended
    trials/study.journal.turn    held by the worker that proposes or tells
    trials/study.journal.workers/TOKEN   the heartbeat count of a worker, then its identity
    trials/study.journal.damaged*        journals that were moved aside, the first without a number

Locks are the kernel's (flock): they end with their process. On NFS, Linux turns them into locks of
the server (NFSv4, or v3 with lockd); Lustre needs the mount option `flock`; with `localflock` they
are local to a node, and then a study must be shared through PostgreSQL. A file system without them
is refused.

A line that was cut short by a kill or a full disk is removed before the next one is appended, and
when a worker joins others. A worker that finds it, or another damage, while no others run moves the
journal aside and starts again from the records.

Not covered: a worker that is stopped (SIGSTOP) while it holds the turn blocks the others; they
print its name.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, TypeVar

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial
from pydantic import ValidationError

from profilers.files import open_regular, read_bounded, require_regular
from tuner.errors import OutputError, PlanUnreadableError, StudyError
from tuner.plans.folder import WORKERS_SUFFIX
from tuner.verify.study.worker import MOST_WORKERS, WORKER_TOKEN, Worker, WorkerHeartbeat

Result = TypeVar("Result")

LOCK_SUFFIX: Final = ".lock"
TURN_SUFFIX: Final = ".turn"

COUNT_DIGITS: Final = 20
MOST_BEAT_BYTES: Final = 8192

MISREAD: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Raised by Optuna for JSON lines that are no journal of this study."""

MOST_JOURNAL_BYTES: Final = 2**28
"""A trial takes some kilobytes."""

SAY_AFTER_S: Final = 30.0
"""Waiting time for the turn before the user sees its holder."""

FIRST_PAUSE_S: Final = 0.002
LONGEST_PAUSE_S: Final = 0.1


class JournalStore:
    """A `Store` in a file."""

    is_beside_records = True

    def __init__(
        self, journal: Path, *, study_name: str, on_message: Callable[[str], None]
    ) -> None:
        """Configure the journal, which need not exist yet.

        Args:
            journal: the file; locks and heartbeats are beside it.
            study_name: of the study in it.
            on_message: gets the holder of the turn after a long wait.
        """
        self._journal = journal
        self._study_name = study_name
        self._on_message = on_message
        self._workers = journal.with_name(f"{journal.name}{WORKERS_SUFFIX}")
        self._watched: set[str] = set()
        with _one_line(journal.parent):
            self._workers.mkdir(parents=True, exist_ok=True)
        for suffix in ("", LOCK_SUFFIX, TURN_SUFFIX):
            _require_file(journal.with_name(f"{journal.name}{suffix}"))

    @property
    def name(self) -> str:
        return str(self._journal)

    def opened(
        self,
        *,
        space: Mapping[str, BaseDistribution],
        sampler: BaseSampler,
        is_only_worker: Callable[[], bool],
    ) -> optuna.Study:
        if not _is_whole(self._journal) and not is_only_worker():
            _take_back_half_a_line(self._journal)
        if _is_whole(self._journal):
            # Complete lines may still be inconsistent for Optuna.
            with contextlib.suppress(*MISREAD):
                study = self._study(sampler)
                distributions = [trial.distributions for trial in study.get_trials(deepcopy=False)]
                is_minimized = study.direction is StudyDirection.MINIMIZE
                if is_minimized and all(
                    space.get(name) == one for each in distributions for name, one in each.items()
                ):
                    return study
        if not is_only_worker():
            raise PlanUnreadableError(
                f"{self._journal} is damaged or of another release, and others work on it: end them"
                " and go on with --resume"
            )
        self._journal.replace(_name_aside(self._journal))
        return self._study(sampler)

    def exclusively(self, action: Callable[[], Result]) -> Result:
        with _one_line(self._journal), self._turn():
            try:
                return action()
            except json.JSONDecodeError as error:
                raise PlanUnreadableError(
                    f"{self._journal} is damaged ({error.msg}): end all that work on it and go on"
                    " with --resume"
                ) from error

    def trial(self, number: int) -> FrozenTrial:
        return self._storage.get_trial(self._trial_id(number))

    def note(self, number: int, key: str, value: object) -> None:
        self._storage.set_trial_user_attr(self._trial_id(number), key, value)

    def watch(self, tokens: Collection[str]) -> None:
        self._watched |= {token for token in tokens if WORKER_TOKEN.fullmatch(token)}

    def heartbeats(self) -> Mapping[str, WorkerHeartbeat]:
        beats_by_token = {}
        listed = {file.name for file in islice(self._workers.iterdir(), MOST_WORKERS)}
        # On NFS a listing may be older than a file; a lookup by name is not.
        for name in sorted(listed | self._watched):
            # A worker may be registering or leaving just now.
            with contextlib.suppress(OSError, ValueError, ValidationError):
                heartbeat = _read_heartbeat(self._workers / name)
                beats_by_token[heartbeat.worker.token] = heartbeat
        return beats_by_token

    def heartbeat(self, heartbeat: WorkerHeartbeat) -> Mapping[str, WorkerHeartbeat] | None:
        # In place: NFS clients see new contents of a file sooner than a new file.
        text = f"{heartbeat.count:0{COUNT_DIGITS}d}\n{heartbeat.worker.model_dump_json()}\n"
        with contextlib.suppress(OSError):
            descriptor = os.open(
                self._workers / heartbeat.worker.token, os.O_CREAT | os.O_WRONLY, 0o666
            )
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
            return self.heartbeats()
        return None

    def forget(self, token: str) -> None:
        with contextlib.suppress(OSError):
            (self._workers / token).unlink(missing_ok=True)

    def leave(self, token: str) -> None:
        self.forget(token)

    def _trial_id(self, number: int) -> int:
        study_id = self._storage.get_study_id_from_name(self._study_name)
        return self._storage.get_trial_id_from_study_id_trial_number(study_id, number)

    def _study(self, sampler: BaseSampler) -> optuna.Study:
        lock = _KernelLock(self._journal.with_name(f"{self._journal.name}{LOCK_SUFFIX}"))
        self._storage = JournalStorage(_MendedFile(str(self._journal), lock_obj=lock))
        return optuna.create_study(
            study_name=self._study_name, storage=self._storage, sampler=sampler, load_if_exists=True
        )

    @contextmanager
    def _turn(self) -> Iterator[None]:
        file = self._journal.with_name(f"{self._journal.name}{TURN_SUFFIX}")
        descriptor = os.open(file, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            self._wait_for_turn(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.uname().nodename}:{os.getpid()}".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def _wait_for_turn(self, descriptor: int) -> None:
        pause_s, began_s, has_reported = FIRST_PAUSE_S, time.monotonic(), False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not has_reported and time.monotonic() - began_s > SAY_AFTER_S:
                    holder = os.pread(descriptor, 300, 0).decode("utf-8", errors="replace")
                    self._on_message(f"waiting for {holder}, which has the turn in {self._journal}")
                    has_reported = True
                time.sleep(pause_s)
                pause_s = min(2.0 * pause_s, LONGEST_PAUSE_S)
            except OSError as error:
                raise StudyError(
                    f"{self._journal}: the file system has no locks ({error.strerror}); mount it"
                    " with them, or share the study with --storage postgresql://..."
                ) from error
            else:
                return


class _KernelLock(JournalFileOpenLock):
    """A lock that ends with its process; Optuna's own locks survive a kill."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file))
        self._file = file
        self._descriptor = -1

    def acquire(self) -> bool:
        self._descriptor = os.open(self._file, os.O_CREAT | os.O_RDWR, 0o666)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        os.close(self._descriptor)


class _MendedFile(JournalFileBackend):
    """A journal that drops an incomplete last line before it appends; Optuna does not."""

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self._lock.acquire()
        try:
            file = Path(self._file_path)
            _take_back_half_a_line(file)
            lines = "".join(f"{json.dumps(log, separators=(',', ':'))}\n" for log in logs)
            with file.open("ab") as stream:
                stream.write(lines.encode())
                stream.flush()
                os.fsync(stream.fileno())
        finally:
            self._lock.release()


def _take_back_half_a_line(file: Path) -> None:
    with file.open("r+b") as stream:
        end = stream.seek(0, os.SEEK_END)
        if end == 0:
            return
        stream.seek(end - 1)
        if stream.read(1) != b"\n":
            stream.seek(0)
            stream.truncate(stream.read().rfind(b"\n") + 1)


def _name_aside(journal: Path) -> Path:
    """Return a new name for a damaged journal."""
    names = (f"{journal.name}.damaged{'' if n == 1 else f'-{n}'}" for n in count(1))
    return next(place for name in names if not (place := journal.with_name(name)).exists())


def _require_file(path: Path) -> None:
    """Refuse files that would block or never end, such as pipes and devices."""
    try:
        require_regular(path, most_bytes=MOST_JOURNAL_BYTES)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise PlanUnreadableError(
            f"{path}: {error.strerror}; move it away and go on with --resume"
        ) from error


def _is_whole(journal: Path) -> bool:
    """Whether every line is complete."""
    if not journal.exists():
        return True
    data = read_bounded(journal, most_bytes=MOST_JOURNAL_BYTES)
    try:
        lines = [json.loads(line) for line in data.splitlines()]
    except (ValueError, RecursionError):
        return False
    return data[-1:] in (b"", b"\n") and all(isinstance(line, dict) for line in lines)


def _read_heartbeat(file: Path) -> WorkerHeartbeat:
    with open_regular(file) as stream:
        count, _, worker = stream.read(MOST_BEAT_BYTES).partition(b"\n")
    return WorkerHeartbeat(count=int(count), worker=Worker.model_validate_json(worker))


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}") from error
