"""A command under a limit of its address space (`ulimit -v`), which native libraries die of.

Python and numpy raise MemoryError. BLAS, torch and the solvers print a line of their own and end
the process, with an exit code that means something else. So under such a limit the command runs in
a child, and a child that did not come to its end has run out of memory.
"""

import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Final

LIMITS: Final = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
OUT_OF_MEMORY: Final = 3
DEADLY: Final = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP)
FORWARDED: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def limited_bytes() -> int | None:
    """Return the smallest limit of this process's memory; None where there is none."""
    soft = [resource.getrlimit(one)[0] for one in LIMITS]
    return min((one for one in soft if one != resource.RLIM_INFINITY), default=None)


def survived(command: Callable[[], int], *, most_bytes: int) -> int:
    """Run a command in a child and return its exit code; 3, in one line, where it died of a limit.

    Args:
        command: returns its exit code.
        most_bytes: the limit, for the message.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _end_with_parent()
        # Its threads reserve the most, and where they cannot it interrupts its own process.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        try:
            return command()
        finally:
            # A parent that was killed hears nothing.
            with suppress(OSError):
                os.write(writer, b"1")
    os.close(writer)
    status = _waited(child)
    came_to_its_end = os.read(reader, 1) == b"1"
    os.close(reader)
    code = os.waitstatus_to_exitcode(status)
    if came_to_its_end or (code < 0 and -code not in DEADLY):
        return code if code >= 0 else 128 - code
    line = f"moetune: ran out of memory under the limit of {most_bytes // 2**20} MiB"
    print(line, "(ulimit -v or -d); raise it", file=sys.stderr)  # noqa: T201 - the command's one line
    return OUT_OF_MEMORY


def _waited(child: int) -> int:
    """Wait for a child; what is sent to us is meant for it."""

    def forward(number: int, _frame: FrameType | None) -> None:
        # Ctrl-C at a terminal reaches both.
        if number != signal.SIGINT or not os.isatty(0):
            os.kill(child, number)

    former = {one: signal.signal(one, forward) for one in FORWARDED}
    try:
        return os.waitpid(child, 0)[1]
    finally:
        for one, handler in former.items():
            signal.signal(one, handler)


def _end_with_parent() -> None:
    """Be ended when the parent is killed."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
