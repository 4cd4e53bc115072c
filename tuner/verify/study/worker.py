"""Liveness of the workers of a study.

A worker sends a heartbeat, a counter that it increments every few seconds. Clocks of different
machines are not compared: a worker is gone once its counter has not changed for the lease, measured
by the observer. Earlier: if it has deregistered, or if it ran in the same place (same boot of the
machine, same PID namespace) and its process no longer exists.

Time without polling counts as one polling interval, so workers that were suspended together (a
suspended job, say) do not take each other for dead when they resume.

Not covered: a worker that was suspended for longer than the lease counts as gone. Its late result
is rejected (claims.py).
"""

import contextlib
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from profilers.records import Record

LEASE_S: Final = 60.0
"""How long a heartbeat may be missing; several times the delay of a shared file system."""

BEATS_PER_LEASE: Final = 6


MOST_WORKERS: Final = 10_000
"""Registrations that are read per study."""

WORKER_TOKEN: Final = re.compile(r"[0-9a-f]{32}")

Text = Annotated[str, Field(max_length=300)]


class Worker(Record):
    """A process that works on a study."""

    token: Annotated[str, Field(pattern=rf"^{WORKER_TOKEN.pattern}$")]
    host: Text
    place: Text
    """Boot id of the machine and PID namespace; empty if unknown."""
    pid: int
    started: int
    """Start in clock ticks after boot; process ids are reused."""

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.host}:{self.pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHeartbeat:
    """The last heartbeat of a worker."""

    worker: Worker
    count: int


def this_worker() -> Worker:
    """Describe this process, with a unique token."""
    return Worker(
        token=secrets.token_hex(16),
        host=socket.gethostname()[:300],
        place=_place(),
        pid=os.getpid(),
        started=_started(os.getpid()) or 0,
    )


def process_has_gone(worker: Worker) -> bool:
    """Whether a worker's process is known here to have ended."""
    return (
        bool(worker.place) and worker.place == _place() and _started(worker.pid) != worker.started
    )


class Attendance:
    """Liveness of the other workers, as observed by one worker."""

    def __init__(self, *, lease_s: float = LEASE_S, now_s: Callable[[], float] = time.monotonic):
        """Start observing; every worker counts as present at first."""
        self.lease_s = lease_s
        self._now_s = now_s
        self._guard = threading.Lock()
        self._looked_s = now_s()
        self._beats: dict[str, WorkerHeartbeat] = {}
        self._still_s: dict[str, float] = {}
        self._changed: set[str] = set()

    def look(self, heartbeats: Mapping[str, WorkerHeartbeat]) -> None:
        """Update registrations and heartbeats since the last call."""
        with self._guard:
            now_s = self._now_s()
            most_s = 2.0 * self.lease_s / BEATS_PER_LEASE
            passed_s = min(now_s - self._looked_s, most_s)
            self._looked_s = now_s
            for token, heartbeat in heartbeats.items():
                before = self._beats.get(token)
                is_still = before == heartbeat
                self._still_s[token] = self._still_s[token] + passed_s if is_still else 0.0
                if before is not None and not is_still:
                    self._changed.add(token)
            self._beats = dict(heartbeats)

    def has_gone(self, token: str) -> bool:
        """Whether a worker deregistered, ended, or sent no heartbeat for the lease."""
        with self._guard:
            heartbeat = self._beats.get(token)
            if heartbeat is None or self._still_s[token] > self.lease_s:
                return True
        return process_has_gone(heartbeat.worker)

    def gone(self) -> tuple[str, ...]:
        """Return the workers that are gone without deregistering."""
        return tuple(token for token in tuple(self._beats) if self.has_gone(token))

    def present(self, *, but: Worker) -> tuple[Worker, ...]:
        """Return the other workers that are not gone."""
        others = [
            heartbeat.worker
            for heartbeat in self._beats.values()
            if heartbeat.worker.token != but.token
        ]
        return tuple(one for one in others if not self.has_gone(one.token))

    def is_seen(self, worker: Worker) -> bool:
        """Whether a worker sent a heartbeat since the first call, or its process runs here."""
        if worker.place and worker.place == _place():
            return not process_has_gone(worker)
        return worker.token in self._changed


@contextmanager
def heartbeat_thread(heartbeat: Callable[[], None], *, lease_s: float) -> Iterator[None]:
    """Call `heartbeat` several times per lease, in a thread, until this is left."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(lease_s / BEATS_PER_LEASE):
            heartbeat()

    thread = threading.Thread(target=go_on, name="beat", daemon=True)
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
