"""Leases: which worker runs a trial, and whether it still does.

A trial holds its worker and a counter that the worker increments every few seconds. Clocks of
different machines are not compared: a lease has ended once it has not changed for `LEASE_S`,
measured by the observer. Earlier: if its worker has left, or ran in the same place (same boot of
the machine, same PID namespace) and its process no longer exists.

Time without polling counts as one polling interval, so workers that were suspended together (a
suspended job, say) do not take each other for dead when they resume.
"""

import contextlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from profilers.records import Record
from profilers.steps.config import Size

LEASE_S: Final = 60.0
"""Seconds that a lease may go without renewal; several times the delay of a shared file system."""

RENEWALS_PER_LEASE: Final = 6

WORKER_TOKEN: Final = re.compile(r"[0-9a-f]{32}")

Text = Annotated[str, Field(max_length=300)]


class Worker(Record):
    """A process that works on a study."""

    token: Annotated[str, Field(pattern=rf"^{WORKER_TOKEN.pattern}$")]
    place: Text
    """Boot id of the machine and PID namespace; empty if unknown."""
    pid: int
    started: int
    """Start in clock ticks after boot; process ids are reused."""


class Lease(Record):
    """A worker's right to a running trial."""

    worker: Worker | None = None
    """The worker that runs the trial; None: it has left."""
    renewals: Size = 0


def this_worker() -> Worker:
    """Describe this process, with a unique token."""
    return Worker(
        token=secrets.token_hex(16),
        place=_place(),
        pid=os.getpid(),
        started=_started(os.getpid()) or 0,
    )


def process_has_gone(worker: Worker) -> bool:
    """Return whether a worker's process is known here to have ended."""
    return (
        bool(worker.place) and worker.place == _place() and _started(worker.pid) != worker.started
    )


class LeaseWatch:
    """The leases of a study's running trials, as observed by one worker."""

    def __init__(self, *, lease_s: float = LEASE_S, now_s: Callable[[], float] = time.monotonic):
        """Start observing; every lease counts as just renewed at first."""
        self.lease_s = lease_s
        self._now_s = now_s
        self._guard = threading.Lock()
        self._observed_s = now_s()
        self._leases: Mapping[int, Lease] = {}
        self._still_s: dict[int, float] = {}

    def observe(self, leases: Mapping[int, Lease]) -> None:
        """Compare the leases of all running trials, by number, with those of the last call."""
        with self._guard:
            now_s = self._now_s()
            passed_s = min(now_s - self._observed_s, 2.0 * self.lease_s / RENEWALS_PER_LEASE)
            self._still_s = {
                number: self._still_s[number] + passed_s
                if self._leases.get(number) == lease
                else 0.0
                for number, lease in leases.items()
            }
            self._observed_s, self._leases = now_s, dict(leases)

    def has_ended(self, number: int, lease: Lease) -> bool:
        """Return whether a trial's worker has left, ended, or not renewed its lease in time."""
        if lease.worker is None or self._still_s.get(number, 0.0) > self.lease_s:
            return True
        return process_has_gone(lease.worker)


@contextmanager
def renewal_thread(renew: Callable[[], None], *, lease_s: float) -> Iterator[None]:
    """Call `renew` several times per lease, in a thread, until this is left."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(lease_s / RENEWALS_PER_LEASE):
            renew()

    thread = threading.Thread(target=go_on, name="renewal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _place() -> str:
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    return ""


def _started(pid: int) -> int | None:
    """Return a process's start in ticks after boot; None if it has ended.

    Source: proc_pid_stat(5), fields 3 and 22; a name may contain spaces and brackets.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    return None
