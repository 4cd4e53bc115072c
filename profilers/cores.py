"""Move between cores that are alike, where another guest of the host slows the one that measures.

Virtual cores are disturbed one by one, so that a rank that is alone can leave a slow one. Only
cores that share the last cache with the first one are taken, so that memory stays as near as it
was, out of those that the thread may use. Where Linux does not say which, or for lack of Linux, a
rank stays where it is.

For one thread: a second one would stay behind.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from profilers.affinity import usable_cores

CPUS: Final = Path("/sys/devices/system/cpu")
LAST_CACHE: Final = "cache/index3/shared_cpu_list"
MOST_CORES: Final = 8
"""Where all of so many are slow, more would be, too."""


class Cores:
    """The cores that this thread moves between; it may run anywhere until `enter`."""

    def __init__(self, near: Sequence[int] = (), *, allowed: frozenset[int] = frozenset()) -> None:
        self._near = tuple(near[:MOST_CORES])
        self._allowed = allowed
        self._at = 0
        self._is_pinned = False

    @classmethod
    def of_this_thread(cls, cpus: Path = CPUS) -> "Cores":
        """Those near the core that this process runs on just now."""
        if not hasattr(os, "sched_getaffinity"):
            return cls()
        allowed = usable_cores()
        here = psutil.Process().cpu_num()
        first = here if here in allowed else min(allowed)
        near = cores_in(cpus / f"cpu{first}" / LAST_CACHE) & allowed
        return cls((first, *sorted(near - {first})), allowed=allowed)

    @property
    def count(self) -> int:
        """How many there are to choose from; one means staying."""
        return max(1, len(self._near))

    @property
    def at(self) -> int:
        """Number of the one that it is on, from 0 to `count`."""
        return self._at

    def enter(self, number: int) -> None:
        """Go to one of them, and stay there."""
        if self.count > 1 and not (self._is_pinned and number == self._at):
            self._at = number
            self._pin(frozenset({self._near[number]}))

    def leave(self) -> None:
        """May run anywhere again, as before."""
        if self._is_pinned:
            self._pin(self._allowed)
            self._is_pinned = False

    def _pin(self, cores: frozenset[int]) -> None:
        try:
            os.sched_setaffinity(0, cores)
            self._is_pinned = True
        except OSError:
            # Taken away in the meantime (a cpuset): whoever took it says where this runs.
            self._near, self._at = (), 0


def cores_in(file: Path) -> frozenset[int]:
    """Read cores as Linux lists them (`0-3,8`); none where it does not say."""
    try:
        parts = file.read_text(encoding="ascii").strip().split(",")
        bounds = [part.partition("-")[::2] for part in parts if part]
        return frozenset(
            core for low, high in bounds for core in range(int(low), int(high or low) + 1)
        )
    except (OSError, ValueError):
        return frozenset()
