"""Who works on a study, and who has gone.

A worker says that it is there by a beat, a number that it counts up every few seconds. Nobody's
clock is compared with another's: a worker has gone when its beat has stood still for the lease, as
measured by whoever looks. Sooner than that: when it has signed off, and when it ran in the same
place (one boot of one machine, one namespace of process ids) and its process is not there any more.

Time in which nobody looked counts as one look's worth, so workers that were all stopped together
(a suspended job, say) do not take each other for dead when they wake.

Not covered: a worker that was merely stopped for longer than the lease counts as gone. What it
brings after it wakes is refused where the study is told (claims.py).
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
"""How long a beat may stand still; several times what a shared file system takes to show it."""

BEATS_PER_LEASE: Final = 6

WORKERS_SUFFIX: Final = ".workers"
"""Of the folder beside a journal that says who works on it."""

MOST_WORKERS: Final = 10_000
"""Registrations that are read of one study."""

WORKER_TOKEN: Final = re.compile(r"[0-9a-f]{32}")

Text = Annotated[str, Field(max_length=300)]


class Worker(Record):
    """A process that works on a study."""

    token: Annotated[str, Field(pattern=rf"^{WORKER_TOKEN.pattern}$")]
    host: Text
    place: Text
    """The boot of the machine and the namespace of its process ids; empty where unknown."""
    pid: int
    started: int
    """Clock ticks after that boot; process ids are used again."""

    @property
    def name(self) -> str:
        """What people know it by."""
        return f"{self.host}:{self.pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The last sign of a worker."""

    worker: Worker
    count: int


def this_worker() -> Worker:
    """Describe this process, under a name that no other one has."""
    return Worker(
        token=secrets.token_hex(16),
        host=socket.gethostname()[:300],
        place=_place(),
        pid=os.getpid(),
        started=_started(os.getpid()) or 0,
    )


def process_has_gone(worker: Worker) -> bool:
    """Whether it can be seen from here that a worker's process has ended."""
    return (
        bool(worker.place) and worker.place == _place() and _started(worker.pid) != worker.started
    )


class Attendance:
    """What one worker has seen of the others."""

    def __init__(self, *, lease_s: float = LEASE_S, now_s: Callable[[], float] = time.monotonic):
        """Begin to look; everybody counts as present at first sight."""
        self.lease_s = lease_s
        self._now_s = now_s
        self._guard = threading.Lock()
        self._looked_s = now_s()
        self._beats: dict[str, Beat] = {}
        self._still_s: dict[str, float] = {}
        self._changed: set[str] = set()

    def look(self, beats: Mapping[str, Beat]) -> None:
        """Note who has signed on, off, or given a sign since the last look."""
        with self._guard:
            now_s = self._now_s()
            most_s = 2.0 * self.lease_s / BEATS_PER_LEASE
            passed_s = min(now_s - self._looked_s, most_s)
            self._looked_s = now_s
            for token, beat in beats.items():
                before = self._beats.get(token)
                is_still = before == beat
                self._still_s[token] = self._still_s[token] + passed_s if is_still else 0.0
                if before is not None and not is_still:
                    self._changed.add(token)
            self._beats = dict(beats)

    def has_gone(self, token: str) -> bool:
        """Whether a worker signed off, has ended, or gave no sign for the lease."""
        with self._guard:
            beat = self._beats.get(token)
            if beat is None or self._still_s[token] > self.lease_s:
                return True
        return process_has_gone(beat.worker)

    def gone(self) -> tuple[str, ...]:
        """Return who has gone without signing off."""
        return tuple(token for token in tuple(self._beats) if self.has_gone(token))

    def present(self, *, but: Worker) -> tuple[Worker, ...]:
        """Return everybody else who has not gone."""
        others = [beat.worker for beat in self._beats.values() if beat.worker.token != but.token]
        return tuple(one for one in others if not self.has_gone(one.token))

    def is_seen(self, worker: Worker) -> bool:
        """Whether a worker gave a sign since the first look, or its process is seen from here."""
        if worker.place and worker.place == _place():
            return not process_has_gone(worker)
        return worker.token in self._changed


@contextmanager
def beating(beat: Callable[[], None], *, lease_s: float) -> Iterator[None]:
    """Call `beat` several times per lease, in a thread, until this is left."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(lease_s / BEATS_PER_LEASE):
            beat()

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
    """When a process was started, in ticks after boot; None where it has ended.

    Source: proc_pid_stat(5), fields 3 and 22; a name may hold spaces and brackets.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    return None
