"""Running launches: one in this thread, or several in worker threads.

A single launch runs in this thread, where Ctrl-C interrupts its wait. Several run in threads; an
exception in this thread, Ctrl-C included, tells them to stop and waits until they have ended their
processes.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Protocol

from tuner.verify.launcher import LaunchResult
from tuner.verify.proposal import Proposal

Run = Callable[[], LaunchResult]


class Flights(Protocol):
    """Running launches by proposal."""

    def __len__(self) -> int: ...

    @property
    def has_room(self) -> bool:
        """Whether another launch may start."""
        ...

    def start(self, proposal: Proposal, run: Run) -> None:
        """Start a launch."""
        ...

    def wait_for_first(self) -> tuple[Proposal, LaunchResult]:
        """Wait for a launch to end, and return it."""
        ...


@contextmanager
def running_launches(parallel: int, *, stop: Callable[[], None]) -> Iterator[Flights]:
    """Keep up to `parallel` launches running; `stop` ends them if this is left by an exception."""
    if parallel == 1:
        yield _One()
        return
    with ThreadPoolExecutor(max_workers=parallel) as threads:
        try:
            yield _Several(threads, parallel)
        except BaseException:
            stop()
            raise


class _One:
    def __init__(self) -> None:
        self._waiting: list[tuple[Proposal, Run]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        return not self._waiting

    def start(self, proposal: Proposal, run: Run) -> None:
        self._waiting.append((proposal, run))

    def wait_for_first(self) -> tuple[Proposal, LaunchResult]:
        proposal, run = self._waiting.pop()
        return proposal, run()


class _Several:
    def __init__(self, threads: ThreadPoolExecutor, parallel: int) -> None:
        self._threads = threads
        self._parallel = parallel
        self._running: dict[Future[LaunchResult], Proposal] = {}

    def __len__(self) -> int:
        return len(self._running)

    @property
    def has_room(self) -> bool:
        return len(self._running) < self._parallel

    def start(self, proposal: Proposal, run: Run) -> None:
        self._running[self._threads.submit(run)] = proposal

    def wait_for_first(self) -> tuple[Proposal, LaunchResult]:
        ended, _ = wait(self._running, return_when=FIRST_COMPLETED)
        first = min(ended, key=lambda one: self._running[one].number)
        return self._running.pop(first), first.result()
