"""End every process of a trial, however often whoever waits asks for the end.

Processes are found by a mark in their environment, the folder of their trial, and by the session
that their command began: engines that rename their processes (setproctitle) write over what the
system shows of an environment, but stay in their session, also when the process that started them
has died. Ranks of torchrun have sessions of their own and keep their environment. Folders inside a
trial's folder count too. Processes are asked first and killed later. People press Ctrl-C twice, and
schedulers send SIGINT and SIGTERM together: only the first of them leads out of what runs, and any
that come while processes are being ended take their patience away and wait for that to be done.

Signals reach the main thread alone: in other threads nothing of them changes. Not covered: SIGKILL,
after which the next verification ends what was left (tuner/verify/leftovers.py).
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final

import psutil

from profilers.files import read_bounded

TRIAL_MARK: Final = "MOETUNE_TRIAL"
"""Environment variable by which a trial's processes are known."""

SESSION_NAME: Final = ".session"
"""In a trial's folder: the session of its command."""

MOST_NESTED: Final = 3
"""Folders between one that is ended and those of its commands."""

MOST_SESSION_BYTES: Final = 256

BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
"""Numbers of processes mean nothing after the next start of the system."""

CLOCK_S: Final = 1.0
"""Two readings of when a process began differ by less."""

GRACE_S: Final = 3.0
"""Between asking processes to end and killing them."""

KILL_ROUNDS: Final = 5
"""Times that processes are looked for and killed; one that is being forked escapes the first."""

LOOK_S: Final = 0.1
"""Between two looks at whether patience is at its end."""

HEEDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """What signals do that ask us to leave while processes run that have to be ended before."""

    def __init__(self) -> None:
        """Begin with letting the first one through."""
        self.came = False
        """Whether one came that was held."""
        self._is_held = False
        self._is_over = False
        self._let_through = False
        self._kept: int | None = None
        self._former: dict[int, Callable[[int, FrameType | None], Any] | int] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Heed a signal."""
        if self._is_held and not self._is_over:
            self.came = True
            self._kept = self._kept or number
            return
        try:
            self._pass_on(number, frame)
        except BaseException:
            self._is_held = self._let_through = True
            raise

    def hold(self) -> None:
        """Let none through from here on."""
        self._is_held = True

    def begin(self) -> None:
        """Take the place of whoever heeds the signals; those that are ignored stay so."""
        for number in HEEDED:
            former = signal.getsignal(number)
            if former not in (None, signal.SIG_IGN):
                self._former[number] = former
                signal.signal(number, self)

    def end(self) -> None:
        """Give the places back, and deliver what was held unless one was let through before."""
        # Should a signal keep us from giving one back: it is passed on from here on.
        self._is_over = True
        for number, former in self._former.items():
            signal.signal(number, former)
        if self._kept is not None and not self._let_through:
            signal.raise_signal(self._kept)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        former = self._former[number]
        if callable(former):
            former(number, frame)
            return
        signal.signal(number, former)
        signal.raise_signal(number)


@contextmanager
def interrupted_once() -> Iterator[Interruption]:
    """Let the first signal through that makes us leave, and none once they are held."""
    found = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    try:
        found.begin()
        yield found
    finally:
        found.end()


def start_marked(
    command: Sequence[str], *, folder: Path, log: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a command whose processes `end_marked` finds.

    Args:
        command: program and arguments; no shell reads them.
        folder: of its trial.
        log: what it prints goes there.
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
    # Where it cannot be written the mark remains.
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
def ended_at_last(mark: str) -> Iterator[None]:
    """Run what starts processes of a mark; all of them are ended when this is left."""
    with interrupted_once() as interruption:
        try:
            yield
        finally:
            interruption.hold()
            end_marked(mark)


def end_marked(mark: str) -> bool:
    """End every process that carries the mark, asking first; return whether none is left.

    Args:
        mark: a trial's folder, or one that holds the folders of several.
    """
    with interrupted_once() as interruption:
        interruption.hold()
        asked = _signalled(mark, signal.SIGTERM)
        _await(asked, hastened=lambda: interruption.came)
        for _ in range(KILL_ROUNDS):
            killed = _signalled(mark, signal.SIGKILL)
            if not killed:
                return True
            _await(killed, hastened=lambda: False)
        return not _marked(mark)


def _signalled(mark: str, number: signal.Signals) -> list[psutil.Process]:
    found = _marked(mark)
    for one in found:
        with contextlib.suppress(psutil.Error):
            one.send_signal(number)
    return found


def _await(processes: list[psutil.Process], *, hastened: Callable[[], bool]) -> None:
    until_s = time.monotonic() + GRACE_S
    while processes and not hastened() and (left_s := until_s - time.monotonic()) > 0.0:
        _, processes = psutil.wait_procs(processes, timeout=min(left_s, LOOK_S))


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    sessions = _sessions(Path(mark))
    for process in psutil.process_iter():
        # Processes of others cannot be read, and those that have ended are no concern.
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            is_ours = _is_of(process, sessions) or _has_mark(process, mark)
            if is_ours and process.pid != os.getpid():
                found.append(process)
    return found


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

    A number stays taken while its session has a member. Where another process has it by now, all
    members had ended.
    """
    found = {}
    for file in _noted(folder, depth=MOST_NESTED):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            noted = json.loads(read_bounded(file, most_bytes=MOST_SESSION_BYTES))
            if noted["boot"] == _boot():
                found[int(noted["session"])] = float(noted["began_s"])
    nobody = {0, 1, os.getsid(0)}
    return {
        session: began_s
        for session, began_s in found.items()
        if session not in nobody and _began(session, began_s)
    }


def _noted(folder: Path, *, depth: int) -> list[Path]:
    """Return the files that note sessions in a folder and its folders; links are not followed."""
    folders = []
    # Folders of a trial may come and go while they are looked through.
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        folders = [one.path for one in entries if depth and one.is_dir(follow_symlinks=False)]
    file = folder / SESSION_NAME
    below = [file for inner in folders for file in _noted(Path(inner), depth=depth - 1)]
    return [*([file] if file.is_file() else []), *below]


def _began(leader: int, began_s: float) -> bool:
    """Whether the leader of a session is the one that was noted, or has ended."""
    try:
        return abs(psutil.Process(leader).create_time() - began_s) <= CLOCK_S
    except psutil.NoSuchProcess:
        return True
