"""Move between equal cores when another guest of the host slows the current one down.

Virtual cores are disturbed one by one, so a single rank can leave a slow one. Only cores that share
the last-level cache with the first one and that the thread may use are taken, so memory stays as
near as it was. Where Linux does not say which cores those are, or on other systems, the rank stays
where it is.

For one thread: a second one would stay behind.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from profilers.affinity import usable_cores

CPUS: Final = Path("/sys/devices/system/cpu")
LAST_LEVEL_CACHE: Final = "cache/index3/shared_cpu_list"
MAX_CORES: Final = 8
"""If that many are all slow, more would be, too."""


class Cores:
    """The cores that this thread moves between; it may run anywhere until `enter`."""

    def __init__(self, near: Sequence[int] = (), *, allowed: frozenset[int] = frozenset()) -> None:
        self._near = tuple(near[:MAX_CORES])
        self._allowed = allowed
        self._current = 0
        self._is_pinned = False

    @classmethod
    def of_this_thread(cls, cpus: Path = CPUS) -> "Cores":
        """Cores near the one that this process runs on."""
        if not hasattr(os, "sched_getaffinity"):
            return cls()
        allowed = usable_cores()
        here = psutil.Process().cpu_num()
        first = here if here in allowed else min(allowed)
        near = parse_cores(cpus / f"cpu{first}" / LAST_LEVEL_CACHE) & allowed
        return cls((first, *sorted(near - {first})), allowed=allowed)

    @property
    def count(self) -> int:
        """How many there are to choose from; with one, the thread stays."""
        return max(1, len(self._near))

    @property
    def current(self) -> int:
        """Number of the core that the thread is on, below `count`."""
        return self._current

    def enter(self, number: int) -> None:
        """Pin the thread to one of them."""
        if self.count > 1 and not (self._is_pinned and number == self._current):
            self._current = number
            self._pin(frozenset({self._near[number]}))

    def leave(self) -> None:
        """Let the thread run anywhere again, as before."""
        if self._is_pinned:
            self._pin(self._allowed)
            self._is_pinned = False

    def _pin(self, cores: frozenset[int]) -> None:
        try:
            os.sched_setaffinity(0, cores)
            self._is_pinned = True
        except OSError:
            # A cpuset took the core away in the meantime; it decides where this thread runs.
            self._near, self._current = (), 0


def parse_cores(file: Path) -> frozenset[int]:
    """Parse a file of cores as Linux lists them (`0-3,8`); empty if it cannot be read."""
    try:
        parts = file.read_text(encoding="ascii").strip().split(",")
        bounds = [part.partition("-")[::2] for part in parts if part]
        return frozenset(
            core for low, high in bounds for core in range(int(low), int(high or low) + 1)
        )
    except (OSError, ValueError):
        return frozenset()
