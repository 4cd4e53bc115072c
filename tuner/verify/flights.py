"""Running launches: one in this thread, or several in worker threads.

A single launch runs in this thread, where Ctrl-C interrupts its wait. Several run in threads; an
exception in this thread, Ctrl-C included, tells them to stop and waits until they have ended their
processes.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

from tuner.verify.launcher import LaunchResult
from tuner.verify.proposal import Proposal

Run = Callable[[], LaunchResult]


class Flights:
    """Running launches by proposal."""

    def __init__(self, parallel: int, threads: ThreadPoolExecutor | None = None) -> None:
        """Start with none; without threads, a launch runs while it is waited for."""
        self._parallel = parallel
        self._threads = threads
        self._running: dict[Future[LaunchResult], Proposal] = {}
        self._waiting: list[tuple[Proposal, Run]] = []

    def __len__(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether another launch may start."""
        return len(self) < self._parallel

    def start(self, proposal: Proposal, run: Run) -> None:
        """Start a launch."""
        if self._threads is None:
            self._waiting.append((proposal, run))
        else:
            self._running[self._threads.submit(run)] = proposal

    def wait_for_first(self) -> tuple[Proposal, LaunchResult]:
        """Wait for a launch to end, and return it."""
        if self._waiting:
            proposal, run = self._waiting.pop()
            return proposal, run()
        ended, _ = wait(self._running, return_when=FIRST_COMPLETED)
        first = min(ended, key=lambda one: self._running[one].number)
        return self._running.pop(first), first.result()


@contextmanager
def running_launches(parallel: int, *, stop: Callable[[], None]) -> Iterator[Flights]:
    """Keep up to `parallel` launches running; `stop` ends them if this is left by an exception."""
    if parallel == 1:
        yield Flights(1)
        return
    with ThreadPoolExecutor(max_workers=parallel) as threads:
        try:
            yield Flights(parallel, threads)
        except BaseException:
            stop()
            raise
