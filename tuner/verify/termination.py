"""Ends every process of a trial, also under repeated signals, and once its verification is gone.

Processes are found by a mark in their environment, the folder of their trial, and by the session
that their command began: engines that rename their processes (setproctitle) overwrite the visible
environment, but stay in their session even if their parent has died. Ranks of torchrun have their
own sessions and keep their environment. Folders inside a trial's folder count too. Processes get
SIGTERM first, then SIGKILL; Python's resource trackers last, as they remove the shared memory of
processes that were killed. Users press Ctrl-C twice, and schedulers send SIGINT and SIGTERM
together: only the first signal interrupts the program; later ones, during the shutdown, skip the
grace period and are delivered afterwards. Signals reach the main thread only; other threads are
unaffected. SIGKILL cannot be handled: another process then ends what was left.

    trials/commands.NODE@SCRATCH    path of a verification's scratch folder; locked (flock)

    guardian            a shell that reads from a pipe of the verification, in a session of its own.
                        If the pipe closes without a line, whatever killed the verification, it
                        becomes `python -m tuner.verify.termination`, which ends the processes and
                        removes the folder
    next verification   of the plan, on this machine: does the same where the guardian was killed,
                        too, or has not finished. The lock ends with its holder

Scratch folders have unique names, so the processes of other verifications are left alone.
Deployments of a plan share ports, so one verification at a time launches them (deployments.lock).

Not covered: file systems without locks, on which every verification counts as running; processes on
other machines or of another user. A next verification removes no folder outside the plan's.
"""

import contextlib
import fcntl
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final

import psutil

from profilers.files import read_bounded
from tuner.errors import EnvironmentMissingError, OutputError

TRIAL_MARK: Final = "MOETUNE_TRIAL"
"""Environment variable that marks a trial's processes."""

SESSION_NAME: Final = ".session"
"""File in a trial's folder that names the session of its command."""

MOST_NESTED: Final = 3
"""Nesting depth between a folder that is ended and those of its commands."""

MOST_SESSION_BYTES: Final = 256

BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
"""Process ids are valid within one boot."""

CLOCK_S: Final = 1.0
"""Tolerance between two readings of a process's start time."""

GRACE_S: Final = 3.0
"""Grace period between SIGTERM and SIGKILL."""

KILL_ROUNDS: Final = 5
"""Rounds of finding and killing; a process that is being forked escapes the first."""

TRACKER: Final = "multiprocessing.resource_tracker"
"""Text in the command line of a process that ends after those whose shared memory it tracks."""

LOOK_S: Final = 0.1
"""Polling interval of the grace period."""

HEEDED: Final[tuple[int, ...]] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that users and schedulers send, the latter to every process at once."""


Handler = Callable[[int, FrameType | None], Any] | int


@dataclass(eq=False)
class Interruption:
    """Handles termination signals while processes run that must be ended first."""

    former: Mapping[int, Handler]
    """The handlers in whose place this one is."""
    came: bool = False
    """Whether a signal was held back."""
    is_held: bool = False
    """Whether signals are held back from here on."""
    has_interrupted: bool = False
    """Whether a signal that was passed on interrupted the program."""
    kept: list[int] = field(default_factory=list)
    """The signals that were held back."""

    def __call__(self, number: int, stack: FrameType | None) -> None:
        """Pass a signal on; the first one that interrupts the program holds back all others."""
        if self.is_held:
            self.came = True
            self.kept.append(number)
            return
        former = self.former[number]
        try:
            if callable(former):
                former(number, stack)
            else:
                signal.signal(number, former)
                signal.raise_signal(number)
        except BaseException:
            self.is_held = self.has_interrupted = True
            raise


@contextmanager
def single_interrupt() -> Iterator[Interruption]:
    """Pass the first termination signal on, and none once they are held back.

    A signal that was held back is delivered at the end. If one was passed on before, only to an
    interruption around this one, which holds it. Ignored signals stay ignored.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in HEEDED if is_main}
    former = {
        number: handler
        for number, handler in handlers.items()
        if handler not in (None, signal.SIG_IGN)
    }
    interruption = Interruption(former)
    try:
        for number in former:
            signal.signal(number, interruption)
        yield interruption
    finally:
        # A signal during the restoration is passed on.
        interruption.is_held = False
        for number, handler in former.items():
            signal.signal(number, handler)
        for kept in interruption.kept[:1]:
            if not interruption.has_interrupted or isinstance(former[kept], Interruption):
                signal.raise_signal(kept)


def start_marked(
    command: Sequence[str], *, folder: Path, log: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a command whose processes `end_marked` finds.

    Args:
        command: program and arguments; no shell reads them.
        folder: of its trial.
        log: of its output.
        environment: of the command.

    Raises:
        OSError: the program cannot be started.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env={**environment, TRIAL_MARK: str(folder.resolve())},
        start_new_session=True,
    )
    # If it cannot be written, the mark remains.
    with contextlib.suppress(OSError, psutil.Error):
        began_s = psutil.Process(process.pid).create_time()
        (folder / SESSION_NAME).write_text(
            json.dumps({"session": process.pid, "began_s": began_s, "boot": _boot()}),
            encoding="ascii",
        )
    return process


def _boot() -> str:
    with contextlib.suppress(OSError):
        return BOOT.read_text(encoding="ascii").strip()
    return ""


@contextmanager
def ensure_ended(mark: str) -> Iterator[Interruption]:
    """End all processes of a mark when this block is left."""
    with single_interrupt() as interruption:
        try:
            yield interruption
        finally:
            interruption.is_held = True
            end_marked(mark)


def end_marked(mark: str) -> bool:
    """End every process with the mark, SIGTERM first; return whether none is left.

    Args:
        mark: a trial's folder, or one that holds the folders of several.
    """
    with single_interrupt() as interruption:
        interruption.is_held = True
        terminating = _signalled(mark, signal.SIGTERM)
        _await(terminating, hastened=lambda: interruption.came)
        for number in range(KILL_ROUNDS):
            killed = _signalled(mark, signal.SIGKILL, spares_trackers=number == 0)
            if not killed:
                return True
            _await(killed, hastened=lambda: False)
        return not _marked(mark)


def _signalled(
    mark: str, number: signal.Signals, *, spares_trackers: bool = False
) -> list[psutil.Process]:
    """Return all processes of a mark, after sending them a signal."""
    processes = _marked(mark)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if not (spares_trackers and TRACKER in " ".join(process.cmdline())):
                process.send_signal(number)
    return processes


def _await(processes: list[psutil.Process], *, hastened: Callable[[], bool]) -> None:
    until_s = time.monotonic() + GRACE_S
    while processes and not hastened() and (left_s := until_s - time.monotonic()) > 0.0:
        _, processes = psutil.wait_procs(processes, timeout=min(left_s, LOOK_S))


def _marked(mark: str) -> list[psutil.Process]:
    marked = []
    sessions = _sessions(Path(mark))
    for process in psutil.process_iter():
        # Processes of other users cannot be read; those that have ended do not matter.
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            is_ours = _is_of(process, sessions) or _has_mark(process, mark)
            if is_ours and process.pid != os.getpid():
                marked.append(process)
    return marked


def _has_mark(process: psutil.Process, mark: str) -> bool:
    its = process.environ().get(TRIAL_MARK)
    return bool(its) and Path(str(its)).is_relative_to(mark)


def _is_of(process: psutil.Process, sessions: Mapping[int, float]) -> bool:
    session = os.getsid(process.pid)
    if session not in sessions or process.status() == psutil.STATUS_ZOMBIE:
        return False
    return process.create_time() >= sessions[session] - CLOCK_S


def _sessions(folder: Path) -> dict[int, float]:
    """Return the sessions that commands of a folder began, and when.

    An id stays in use while its session has a member. If another process has it by now, all members
    had ended.
    """
    began_by_session = {}
    # Links are not followed, and folders may appear and disappear meanwhile.
    for place, folders, _ in os.walk(folder):
        if len(Path(place).relative_to(folder).parts) == MOST_NESTED:
            folders.clear()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            noted = json.loads(
                read_bounded(Path(place, SESSION_NAME), most_bytes=MOST_SESSION_BYTES)
            )
            if noted["boot"] == _boot():
                began_by_session[int(noted["session"])] = float(noted["began_s"])
    nobody = {0, 1, os.getsid(0)}
    return {
        session: began_s
        for session, began_s in began_by_session.items()
        if session not in nobody and _began(session, began_s)
    }


def _began(leader: int, began_s: float) -> bool:
    """Return whether the leader of a session is the recorded process, or has ended."""
    try:
        return abs(psutil.Process(leader).create_time() - began_s) <= CLOCK_S
    except psutil.NoSuchProcess:
        return True


MOST_PATH_BYTES: Final = 4096
DISMISS_S: Final = 5.0
"""Seconds after which a guardian that is told to end is killed."""

GUARDIAN: Final = ("/bin/sh", "-c", 'trap "" HUP INT TERM; read -r line || exec "$@"', "sh")
"""A shell and not Python: it starts within milliseconds and holds next to no memory."""

SCRATCH_PREFIX: Final = "moetune-"
"""Prefix of folders with the files and logs of running trials."""
LOCK_NAME: Final = "deployments.lock"


@contextmanager
def register_scratch(trials: Path, *, scratch: Path) -> Iterator[None]:
    """Register and guard the folder of this verification's trials, and remove it in the end.

    Args:
        trials: folder of the plan's trials.
        scratch: folder of the trials' folders; its name is unique.

    Raises:
        OutputError: the folder cannot be written.
        EnvironmentMissingError: no shell can be started.
    """
    registration = trials / f"{_prefix()}{scratch.name}"
    hidden = registration.with_name(f".{registration.name}")
    with _writable(trials):
        stream = hidden.open("wb")
    with stream:
        guardian = None
        try:
            stream.write(os.fsencode(scratch.resolve()))
            stream.flush()
            # Invisible until it is locked.
            with contextlib.suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            hidden.rename(registration)
            guardian = _start_guardian(registration, scratch=scratch)
            yield
        finally:
            with single_interrupt() as interruption:
                interruption.is_held = True
                hidden.unlink(missing_ok=True)
                # Processes that still run are found by this file only.
                if end_marked(str(scratch.resolve())):
                    shutil.rmtree(scratch, ignore_errors=True)
                    registration.unlink(missing_ok=True)
                if guardian is not None:
                    _dismiss(guardian)


@contextmanager
def scratch_folder(
    trials: Path,
    *,
    inside: Path | None = None,
    on_message: Callable[[str], None] = lambda _line: None,
) -> Iterator[Path]:
    """End leftovers, and yield a new folder for this verification's trials, guarded.

    Args:
        trials: folder of the plan's trials.
        inside: folder to make it in, e.g. `trials`, which other nodes see; None: the temporary one.
        on_message: gets a line if something was ended.

    Raises:
        OutputError: the folder cannot be written.
        EnvironmentMissingError: no shell can be started.
    """
    if end_leftovers(trials):
        on_message("a verification of this plan was killed; its processes here are ended")
    with _writable(trials):
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=inside))
    with register_scratch(trials, scratch=scratch):
        yield scratch


@contextmanager
def exclusive_use(trials: Path, *, plan: Path) -> Iterator[Path]:
    """Lock a plan's deployments, end leftovers, and yield the scratch folder.

    Args:
        trials: folder of the plan's trials.
        plan: folder of the plan, for the message.

    Raises:
        OutputError: the folder cannot be written, or another verification has it.
        EnvironmentMissingError: no shell can be started.
    """
    with _writable(trials):
        lock = (trials / LOCK_NAME).open("wb")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"{plan}: another `moetune verify` launches this plan's deployments; wait for it,"
                " or copy the plan"
            ) from error
        except OSError:
            pass  # No locks there, see above.
        with scratch_folder(trials, inside=trials) as scratch:
            yield scratch


@contextmanager
def _writable(trials: Path) -> Iterator[None]:
    """Make the folder of trials; refuse it if it, or what is opened here, cannot be written."""
    try:
        trials.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise OutputError(f"cannot write {str(trials)!r}: {error.strerror}") from error


def _dismiss(guardian: subprocess.Popen[bytes]) -> None:
    """Tell the guardian that nothing is left; a stopped shell does not answer."""
    try:
        guardian.communicate(b"\n", timeout=DISMISS_S)
    except subprocess.TimeoutExpired:
        guardian.kill()
        guardian.wait()


def _start_guardian(registration: Path, *, scratch: Path) -> subprocess.Popen[bytes]:
    ender = (
        sys.executable,
        "-P",
        "-m",
        "tuner.verify.termination",
        str(registration),
        str(scratch.resolve()),
    )
    # It must not count as a process of a trial that this verification may be.
    environment = {name: value for name, value in os.environ.items() if name != TRIAL_MARK}
    # The shell inherits the mask, which holds back what arrives before its trap is set.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEEDED)
    try:
        return subprocess.Popen(
            (*GUARDIAN, *ender),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentMissingError(f"{GUARDIAN[0]}: {error.strerror}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_leftovers(trials: Path) -> int:
    """End the processes of killed verifications here; return how many verifications there were."""
    dead = 0
    for file in sorted(trials.glob(f"{glob.escape(_prefix())}*")):
        with contextlib.suppress(OSError), file.open("rb+") as stream:
            # A running verification holds the lock.
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            scratch = Path(os.fsdecode(stream.read(MOST_PATH_BYTES)))
            # Its folders may be gone by now; a damaged file names none.
            is_named = scratch.is_absolute() and file.name == f"{_prefix()}{scratch.name}"
            if not is_named or end_marked(str(scratch)):
                file.unlink(missing_ok=True)
                dead += 1
                if scratch.parent == trials.resolve():
                    shutil.rmtree(scratch, ignore_errors=True)
    return dead


def _prefix() -> str:
    return f"commands.{os.uname().nodename}@"


def main(arguments: Sequence[str]) -> None:
    """End a killed verification: its file, and its scratch folder."""
    registration, scratch = map(Path, arguments)
    if end_marked(str(scratch)):
        registration.unlink(missing_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
