"""End every process of a trial, however often whoever waits asks for the end.

Processes are found by a mark in their environment, the folder of their trial; those of folders
inside it count too. They are asked first and killed later. People press Ctrl-C twice, and
schedulers send SIGINT and SIGTERM together: only the first of them leads out of what runs, and any
that come while processes are being ended take their patience away and wait for that to be done.

Signals reach the main thread alone: in other threads nothing of them changes. Not covered: SIGKILL,
after which the next verification ends what was left (tuner/verify/leftovers.py).
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import psutil

TRIAL_MARK: Final = "MOETUNE_TRIAL"
"""Environment variable by which a trial's processes are known."""

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
    for process in psutil.process_iter():
        # Processes of others cannot be read, and those that have ended are no concern.
        with contextlib.suppress(psutil.Error):
            its = process.environ().get(TRIAL_MARK)
            if its and Path(its).is_relative_to(mark) and process.pid != os.getpid():
                found.append(process)
    return found
