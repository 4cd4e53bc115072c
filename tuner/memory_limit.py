"""Runs a command under an address space limit (`ulimit -v`) and reports running out of memory.

Python and numpy raise MemoryError. BLAS, torch and the solvers print their own message and end the
process, with an exit code of another meaning. So under such a limit the command runs in a child
process, and a child that ends early has run out of memory.
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


def memory_limit_bytes() -> int | None:
    """Return the lowest memory limit of this process; None where there is none."""
    soft = [resource.getrlimit(kind)[0] for kind in LIMITS]
    return min((limit for limit in soft if limit != resource.RLIM_INFINITY), default=None)


def run_limited(command: Callable[[], int], *, most_bytes: int) -> int:
    """Run a command in a child and return its exit code; 3 and one line if the limit killed it.

    Args:
        command: returns its exit code.
        most_bytes: the limit, for the message.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _end_with_parent()
        # Its threads reserve much memory, and it interrupts its own process where they cannot.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        try:
            return command()
        finally:
            # A killed parent reads nothing.
            with suppress(OSError):
                os.write(writer, b"1")
    os.close(writer)
    status = _wait(child)
    has_finished = os.read(reader, 1) == b"1"
    os.close(reader)
    code = os.waitstatus_to_exitcode(status)
    if has_finished or (code < 0 and -code not in DEADLY):
        return code if code >= 0 else 128 - code
    line = f"moetune: ran out of memory under the limit of {most_bytes // 2**20} MiB"
    print(line, "(ulimit -v or -d); raise it", file=sys.stderr)  # noqa: T201 - the command's one line
    return OUT_OF_MEMORY


def _wait(child: int) -> int:
    """Wait for a child, and forward signals to it."""

    def forward(number: int, _stack: FrameType | None) -> None:
        # Ctrl-C at a terminal reaches both.
        if number != signal.SIGINT or not os.isatty(0):
            os.kill(child, number)

    former = {signum: signal.signal(signum, forward) for signum in FORWARDED}
    try:
        return os.waitpid(child, 0)[1]
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)


def _end_with_parent() -> None:
    """Terminate this process when its parent is killed."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
