"""A study in a journal file, for workers on one node or on a file system that they share.

    trials/study.journal         what happened, line by line (Optuna's journal)
    trials/study.journal.lock    held while a line is appended
    trials/study.journal.turn    held by the one worker that proposes or tells
    trials/study.journal.workers/TOKEN   the beat of a worker, then who it is
    trials/study.journal.damaged*        journals that were moved aside, the first without a number

Locks are the kernel's (flock): they end with their process, whatever ends it. On NFS, Linux makes
them locks of the server (NFSv4, or v3 with lockd); Lustre needs the mount option `flock`, with
`localflock` they reach one node only, and then a study must be shared through PostgreSQL. A file
system without them is refused.

A line that a kill or a full disk cut short is taken back before the next one is appended, and when
somebody joins others at work. Whoever comes alone, to that or to a journal damaged otherwise, moves
it aside and begins anew from the records.

Not covered: a worker that is stopped (SIGSTOP) while it has the turn keeps the others waiting;
they say for whom.
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
from tuner.verify.study.worker import MOST_WORKERS, WORKER_TOKEN, WORKERS_SUFFIX, Beat, Worker

Answer = TypeVar("Answer")

LOCK_SUFFIX: Final = ".lock"
TURN_SUFFIX: Final = ".turn"

COUNT_DIGITS: Final = 20
MOST_BEAT_BYTES: Final = 8192

MISREAD: Final = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What Optuna raises at lines that are JSON and no journal of this study."""

MOST_JOURNAL_BYTES: Final = 2**28
"""A trial takes some kilobytes."""

SAY_AFTER_S: Final = 30.0
"""Of waiting for the turn, before the user hears whom it is waited for."""

FIRST_PAUSE_S: Final = 0.002
LONGEST_PAUSE_S: Final = 0.1


class JournalStore:
    """A `Store` in a file."""

    is_beside_records = True

    def __init__(self, journal: Path, *, study_name: str, told: Callable[[str], None]) -> None:
        """Say where the journal is, or is to be.

        Args:
            journal: the file; beside it lie its locks and the beats.
            study_name: of the study in it.
            told: hears whom the turn is waited for.
        """
        self._journal = journal
        self._study_name = study_name
        self._told = told
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
        is_alone: Callable[[], bool],
    ) -> optuna.Study:
        if not _is_whole(self._journal) and not is_alone():
            _take_back_half_a_line(self._journal)
        if _is_whole(self._journal):
            # Whole lines can still tell a story that Optuna cannot follow.
            with contextlib.suppress(*MISREAD):
                study = self._study(sampler)
                asked = [trial.distributions for trial in study.get_trials(deepcopy=False)]
                is_minimized = study.direction is StudyDirection.MINIMIZE
                if is_minimized and all(
                    space.get(name) == one for each in asked for name, one in each.items()
                ):
                    return study
        if not is_alone():
            raise PlanUnreadableError(
                f"{self._journal} is damaged or of another release, and others work on it: end them"
                " and go on with --resume"
            )
        self._journal.replace(_name_aside(self._journal))
        return self._study(sampler)

    def exclusively(self, action: Callable[[], Answer]) -> Answer:
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

    def beats(self) -> Mapping[str, Beat]:
        found = {}
        listed = {file.name for file in islice(self._workers.iterdir(), MOST_WORKERS)}
        # A listing, on NFS, may be older than a file; a file that is asked for by name is not.
        for name in sorted(listed | self._watched):
            # One that is signing on or off just now.
            with contextlib.suppress(OSError, ValueError, ValidationError):
                beat = _beat(self._workers / name)
                found[beat.worker.token] = beat
        return found

    def beat(self, beat: Beat) -> Mapping[str, Beat] | None:
        # In place: clients of NFS see new contents of a file sooner than a new file.
        text = f"{beat.count:0{COUNT_DIGITS}d}\n{beat.worker.model_dump_json()}\n"
        with contextlib.suppress(OSError):
            descriptor = os.open(self._workers / beat.worker.token, os.O_CREAT | os.O_WRONLY, 0o666)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
            return self.beats()
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
        pause_s, began_s, is_told = FIRST_PAUSE_S, time.monotonic(), False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not is_told and time.monotonic() - began_s > SAY_AFTER_S:
                    holder = os.pread(descriptor, 300, 0).decode("utf-8", errors="replace")
                    self._told(f"waiting for {holder}, which has the turn in {self._journal}")
                    is_told = True
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
    """A lock that ends with the process that holds it; Optuna's own outlive a kill."""

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
    """A journal in which no line follows half of another; Optuna appends to that unawares."""

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
    """Where a damaged journal goes; what went there before stays."""
    names = (f"{journal.name}.damaged{'' if n == 1 else f'-{n}'}" for n in count(1))
    return next(place for name in names if not (place := journal.with_name(name)).exists())


def _require_file(path: Path) -> None:
    """Refuse what Optuna and we would wait for, or read without an end."""
    try:
        require_regular(path, most_bytes=MOST_JOURNAL_BYTES)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise PlanUnreadableError(
            f"{path}: {error.strerror}; move it away and go on with --resume"
        ) from error


def _is_whole(journal: Path) -> bool:
    """Whether every line was written to its end."""
    if not journal.exists():
        return True
    data = read_bounded(journal, most_bytes=MOST_JOURNAL_BYTES)
    try:
        lines = [json.loads(line) for line in data.splitlines()]
    except (ValueError, RecursionError):
        return False
    return data[-1:] in (b"", b"\n") and all(isinstance(line, dict) for line in lines)


def _beat(file: Path) -> Beat:
    with open_regular(file) as stream:
        count, _, worker = stream.read(MOST_BEAT_BYTES).partition(b"\n")
    return Beat(count=int(count), worker=Worker.model_validate_json(worker))


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}") from error
