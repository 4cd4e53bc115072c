"""Results of independent tasks, computed in parallel by forked processes.

Every process, this one included, takes the next task when it is free, so results do not depend on
who computed what. A forked process shares what this one has read and built until then. It returns
plain numbers, with a few words where a task has some (`Worded`). Where no process can be forked,
and for the tasks of one that died, this process computes alone.

Not covered: systems other than Linux, where forking a process that has loaded numpy is not safe.
"""

import contextlib
import math
import os
import select
import signal
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from typing import Final

Task = Callable[[], float | None]
"""Computes one number; None where there is none."""

MOST_TASKS: Final = 256
"""An index is one byte."""

MOST_WORDS_BYTES: Final = 247
"""Largest number of UTF-8 bytes of a task's words; longer text is cut."""

RECORD: Final = struct.Struct(f"<Bd{MOST_WORDS_BYTES}s")
"""Index of a task, its number, not-a-number where it has none, and its words: few enough bytes that
a pipe takes them whole."""


class Worded(float):
    """A number with a few words about it."""

    words: str

    def __new__(cls, number: float, words: str) -> "Worded":
        """Put words beside a number."""
        made = super().__new__(cls, number)
        made.words = words
        return made


def numbers(
    tasks: Sequence[Task],
    *,
    processes: int,
    patience_s: float,
    starting: Callable[[int], None] = lambda _index: None,
) -> list[float | None]:
    """Return the number of every task.

    Args:
        tasks: independent of each other; the longest should come first.
        processes: at most so many at a time, this one included.
        patience_s: how long to wait for others when this process has nothing left to do.
        starting: called with the index of each task that this process begins.
    """
    others = min(processes, len(tasks)) - 1
    results: dict[int, float | None] = {}
    if others > 0 and sys.platform == "linux" and len(tasks) <= MOST_TASKS:
        results = _shared(tasks, others=others, patience_s=patience_s, starting=starting)
    for index, task in enumerate(tasks):
        if index not in results:
            starting(index)
            results[index] = task()
    return [results[index] for index in range(len(tasks))]


def _shared(
    tasks: Sequence[Task], *, others: int, patience_s: float, starting: Callable[[int], None]
) -> dict[int, float | None]:
    """Share tasks with other processes; return the numbers of those that were computed."""
    results: dict[int, float | None] = {}
    with _pipe() as (queue, fill), _pipe() as (read_end, write_end), _workers() as workers:
        fill.write(bytes(range(len(tasks))))
        fill.close()
        for _ in range(others):
            with contextlib.suppress(OSError):  # cannot fork: this process works alone
                workers.append(_forked(tasks, queue=queue, results=write_end))
        write_end.close()
        for index in _taken(queue):
            starting(index)
            results[index] = tasks[index]()
        results |= _read_results(read_end, patience_s=patience_s) if workers else {}
    return results


def _forked(tasks: Sequence[Task], *, queue: FileIO, results: FileIO) -> int:
    """Start a process that takes tasks from the queue until none is left; return its id."""
    parent = os.getpid()
    with warnings.catch_warnings():
        # From Python 3.12 on, of threads beside this one: a progress bar has one, and the new
        # process neither prints nor waits for it.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    # Only numbers and words leave from here: no exception, no output, no handler of the parent's.
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for index in _taken(queue):
            number = tasks[index]()
            words = number.words if isinstance(number, Worded) else ""
            said = words.encode()[:MOST_WORDS_BYTES]
            results.write(RECORD.pack(index, math.nan if number is None else number, said))
            if os.getppid() != parent:
                break
    finally:
        os._exit(0)


def _taken(queue: FileIO) -> Iterator[int]:
    """Take tasks, one byte at a time, until none is left."""
    while taken := queue.read(1):
        yield taken[0]


def _read_results(results: FileIO, *, patience_s: float) -> dict[int, float | None]:
    """Collect the results of other processes until all have ended or take too long."""
    received = b""
    while select.select([results], [], [], patience_s)[0]:
        part = results.read(RECORD.size * MOST_TASKS)
        if not part:
            break
        received += part
    whole = len(received) - len(received) % RECORD.size
    return {
        index: _number(number, said.rstrip(b"\0").decode(errors="ignore"))
        for index, number, said in RECORD.iter_unpack(received[:whole])
    }


def _number(number: float, words: str) -> float | None:
    if math.isnan(number):
        return None
    return Worded(number, words) if words else number


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """Give the ends of a pipe, to read and to write, and close them."""
    out, into = os.pipe()
    with FileIO(out, "r") as reading, FileIO(into, "w") as writing:
        yield reading, writing


@contextlib.contextmanager
def _workers() -> Iterator[list[int]]:
    """Give a list of processes, all of which are ended and waited for."""
    workers: list[int] = []
    try:
        yield workers
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
