"""Detect ranks that died or hang, where a launcher started them.

Every rank writes a heartbeat into the job's store every `BEAT_S` seconds from its own thread: the
number of the beat and of finished cases. The first rank reads all of them, and every other rank the
first one's. A rank whose beats stop for `GONE_S` has died, or its node is gone; one that beats but
is the only one behind for `STUCK_S` hangs. Either ends the run: the thread names the rank, and the
process exits, because its main thread waits in a collective that will never complete.

A store that cannot be reached means that the first rank, which keeps it, is gone.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

BEAT_S: Final = 1.0
GONE_S: Final = 15.0
STUCK_S: Final = 150.0
"""Longer than any case may take, shorter than the timeout of collectives."""
PREFIX: Final = "moetune-beat-"


class KeyValueStore(Protocol):
    """A job's key-value store; torch.distributed.TCPStore is one."""

    def set(self, key: str, value: str, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The last heartbeat of one rank."""

    number: int
    cases: int

    @classmethod
    def parsed(cls, text: bytes) -> "Beat":
        """Read `number cases`."""
        number, _, cases = text.decode("ascii").partition(" ")
        return cls(number=int(number), cases=int(cases))

    def written(self) -> str:
        """The text that `parsed` reads."""
        return f"{self.number} {self.cases}"


@dataclass(slots=True, kw_only=True)
class FaultDetector:
    """Finds dead and hanging ranks from their beats; has no store and no clock of its own."""

    names: Mapping[int, str]
    """Of the ranks to watch, for messages."""
    gone_s: float = GONE_S
    stuck_s: float = STUCK_S
    _last: dict[int, Beat] = field(default_factory=dict)
    _beaten_s: dict[int, float] = field(default_factory=dict)
    _moved_s: dict[int, float] = field(default_factory=dict)

    def update(self, beats: Mapping[int, Beat], *, own_cases: int, now_s: float) -> str:
        """Add the beats of all ranks; returns what is wrong, or nothing."""
        for rank, beat in beats.items():
            before = self._last.get(rank)
            if before is None or beat.number != before.number:
                self._beaten_s[rank] = now_s
            if before is None or beat.cases != before.cases:
                self._moved_s[rank] = now_s
            self._last[rank] = beat
        return self._gone(now_s) or self._stuck(now_s, own_cases=own_cases)

    def _gone(self, now_s: float) -> str:
        for rank, beaten_s in sorted(self._beaten_s.items(), key=lambda item: item[1]):
            if now_s - beaten_s > self.gone_s:
                return f"{self.names[rank]} died or was cut off {now_s - beaten_s:.0f} s ago"
        return ""

    def _stuck(self, now_s: float, *, own_cases: int) -> str:
        behind = [rank for rank, beat in self._last.items() if beat.cases < own_cases]
        for rank in sorted(behind, key=lambda rank: self._moved_s[rank]):
            waited_s = now_s - self._moved_s[rank]
            if waited_s > self.stuck_s:
                return f"{self.names[rank]} hangs: no case done in {waited_s:.0f} s"
        return ""


class Heartbeat:
    """The thread of one rank; start it when all ranks are connected."""

    def __init__(
        self,
        store: KeyValueStore,
        *,
        rank: int,
        names: Mapping[int, str],
        lost: Callable[[str], None],
        beat_s: float = BEAT_S,
        detector: FaultDetector | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._lost = lost
        self._beat_s = beat_s
        self._detector = detector or FaultDetector(names=names)
        self._names = names
        self._cases = 0
        self._ended = threading.Event()
        self._fault = ""
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start; the first beat is in the store before any rank reads it."""
        self._say(0)
        self._thread.start()

    def case_done(self) -> None:
        """Count a finished case; the next beat carries it."""
        self._cases += 1

    def blamed(self, *, patience_s: float) -> str:
        """Wait for the thread to find the lost rank; empty if it finds none in that time."""
        self._lost = _keep_quiet
        self._settled.wait(patience_s)
        return self._fault

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        number = 0
        while not self._ended.wait(self._beat_s):
            number += 1
            try:
                self._say(number)
                fault = self._listen()
            except (RuntimeError, OSError):
                # Only the first rank keeps the store.
                fault = (
                    "" if self._ended.is_set() else "the first rank, which keeps the store, left"
                )
            if fault:
                self._fault = fault
                self._settled.set()
                self._lost(fault)
                return

    def _say(self, number: int) -> None:
        beat = Beat(number=number, cases=self._cases)
        self._store.set(f"{PREFIX}{self._rank}", beat.written())

    def _listen(self) -> str:
        ranks: Sequence[int] = sorted(self._names)
        if not ranks:
            return ""
        texts = self._store.multi_get([f"{PREFIX}{rank}" for rank in ranks])
        beats = {rank: Beat.parsed(text) for rank, text in zip(ranks, texts, strict=True)}
        return self._detector.update(beats, own_cases=self._cases, now_s=time.monotonic())


def _keep_quiet(_fault: str) -> None:
    """Do nothing: the caller of `blamed` reports the rank."""
