"""What a run of tests leaves behind: processes and folders in the temporary directory.

Processes that the tests start are known by a variable in their environment, which they keep when
their parent ends and they are nobody's children any more; forked ones by their parent. Folders are
looked for in the run's own temporary directory, so runs side by side do not see each other's.

Not covered: a process that was started with an environment of its own and has lost its parent.
"""

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from tests.patience import patient_s

MARK: Final = "MOETUNE_TESTS"
PATTERNS: Final = ("moetune-*", "torchelastic_*")
"""For processes that are about to end."""
OWN_LIFE: Final = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Helpers of Python that end with the process that they serve."""


class Leaks:
    """What one run has left so far."""

    def __init__(self, temporary: Path) -> None:
        """Mark everything that is started from now on.

        Args:
            temporary: the temporary directory of this run.
        """
        self._temporary = temporary
        self._mark = secrets.token_hex(8)
        self._first_seen: dict[int | Path, str] = {}
        os.environ[MARK] = self._mark

    def note(self, name: str) -> None:
        """Note what is there after some tests, to say later where it came from."""
        left: list[int | Path] = [process.pid for process in self._processes()]
        for one in (*left, *self._folders()):
            self._first_seen.setdefault(one, name)

    def found(self) -> list[str]:
        """End the processes that are left, and say a line for each of them and each folder."""
        until_s = time.monotonic() + patient_s(5.0)
        while (left := list(self._processes())) and time.monotonic() < until_s:
            time.sleep(0.1)
        lines = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                line = f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
                process.send_signal(signal.SIGKILL)
                lines.append(f"{line} (first seen after {self._first_seen.get(process.pid)})")
        return lines + [
            f"folder {path} (first seen after {self._first_seen.get(path)})"
            for path in self._folders()
        ]

    def _folders(self) -> list[Path]:
        return [path for pattern in PATTERNS for path in self._temporary.glob(pattern)]

    def _processes(self) -> Iterator[psutil.Process]:
        ours = {process.pid for process in psutil.Process().children(recursive=True)}
        for process in psutil.process_iter():
            # Processes end while they are looked at, and others' are closed to us.
            with contextlib.suppress(psutil.Error):
                is_ours = process.pid in ours or process.environ().get(MARK) == self._mark
                if not is_ours or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.pid != os.getpid() and not _has_own_life(process):
                    yield process


def _has_own_life(process: psutil.Process) -> bool:
    return any(name in word for name in OWN_LIFE for word in process.cmdline())
