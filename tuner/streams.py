"""Prepares the standard streams of the process before a command runs.

A stream that the caller closed (`>&-`) is None in Python, `print(file=None)` writes to another
one, and the next opened file takes its descriptor: it becomes the null device instead. Output on
stderr is optional; where it cannot be written (a full disk, a closed pipe), the command continues
with the same exit code.
"""

import io
import os
import sys
from typing import Any, Final

STDIN: Final = 0
STDOUT: Final = 1
STDERR: Final = 2


def make_usable() -> None:
    """Open the streams that are closed, and make writes to stderr never fail."""
    for descriptor, flags in ((STDIN, os.O_RDONLY), (STDOUT, os.O_WRONLY), (STDERR, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor is taken, and those below are open by now.
            os.set_inheritable(os.open(os.devnull, flags), True)
    if sys.stdin is None:
        sys.stdin = open(STDIN, encoding="utf-8", closefd=False)  # noqa: SIM115 - a descriptor
    if sys.stdout is None:
        sys.stdout = open(STDOUT, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - a descriptor
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_BestEffortStderr()),
        encoding=getattr(sys.stderr, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


class _BestEffortStderr(io.RawIOBase):
    """Stderr that drops what cannot be written."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return STDERR

    def isatty(self) -> bool:
        return os.isatty(STDERR)

    def write(self, data: Any) -> int:
        try:
            return os.write(STDERR, data)
        except OSError:
            return len(data)
