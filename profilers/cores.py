"""Move between cores that are alike, where another guest of the host slows the one that measures.

Virtual cores are disturbed one by one: a rank that is alone finds a quiet one more often by moving
than by waiting. Only cores that share the last cache with the first one are taken, so that memory
stays as near as it was, out of those that the process may use. Where Linux does not say which, or
for lack of Linux, a rank stays where it is.

Measured with one thread; a second one would stay behind.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

CPUS: Final = Path("/sys/devices/system/cpu")
LAST_CACHE: Final = "cache/index3/shared_cpu_list"
MOST_CORES: Final = 8
"""Where all of so many are slow, more would be, too."""


class Cores:
    """The cores that this thread moves between, and may use again when it is done."""

    def __init__(self, near: Sequence[int] = (), *, allowed: frozenset[int] = frozenset()) -> None:
        self._near = near[:MOST_CORES]
        self._allowed = allowed
        self._at = 0

    @classmethod
    def of_this_thread(cls, cpus: Path = CPUS) -> "Cores":
        """Those near the core that this thread runs on just now; it is not moved yet."""
        if not hasattr(os, "sched_getaffinity"):
            return cls()
        allowed = frozenset(os.sched_getaffinity(0))
        here = psutil.Process().cpu_num()
        near = listed(cpus / f"cpu{here}" / LAST_CACHE) & allowed
        return cls((here, *sorted(near - {here})), allowed=allowed)

    @property
    def count(self) -> int:
        """How many there are to choose from."""
        return len(self._near)

    def move(self) -> None:
        """Go on to the next core."""
        if self.count > 1:
            self._at = (self._at + 1) % self.count
            self._pin({self._near[self._at]})

    def leave(self) -> None:
        """May run anywhere again, as before."""
        if self.count > 1:
            self._pin(self._allowed)

    def _pin(self, cores: frozenset[int] | set[int]) -> None:
        try:
            os.sched_setaffinity(0, cores)
        except OSError:
            # Taken away in the meantime (a cpuset): whoever took it says where this runs.
            self._near = ()


def listed(file: Path) -> frozenset[int]:
    """Read cores as Linux lists them (`0-3,8`); none where it does not say."""
    try:
        parts = file.read_text(encoding="ascii").strip().split(",")
        bounds = [part.partition("-")[::2] for part in parts if part]
        return frozenset(
            core for low, high in bounds for core in range(int(low), int(high or low) + 1)
        )
    except (OSError, ValueError):
        return frozenset()
