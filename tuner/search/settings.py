"""Settings of a search: its time, its scope and its progress listener."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from tuner.search.progress import ProgressListener, ignore_progress

WORTH_NAMING_RATIO = 5e-3
"""Gain of a feature that no target has, below which it is not worth a line."""

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A time limit that has begun."""

    begun_s: float
    """Reading of `clock` at the start."""
    limit_s: float
    clock: Callable[[], float] = time.perf_counter

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return self.clock() - self.begun_s

    @property
    def left_s(self) -> float:
        """Return the seconds until the end; 0 after it."""
        return max(0.0, self.limit_s - self.elapsed_s)

    @property
    def is_over(self) -> bool:
        """Return whether more time has passed than the limit."""
        return self.elapsed_s > self.limit_s

    def before_end(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield items while time is left."""
        return itertools.takewhile(lambda _: self.left_s > 0.0, items)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """Settings of a search; each search reads what it has a use for."""

    top: int = 8
    """Least number of layouts to find, if there are as many (layout_groups.py)."""
    band_ratio: float = 0.0
    """Decisions that are slower than the best by at most this share are found and counted."""
    below_s: float = math.inf
    """Slower steps are not searched for; a bound then covers faster ones only."""
    processes: int = 1
    """Processes for follow-up searches side by side; one search is one process."""
    time_limit_s: float = 60.0
    clock: Callable[[], float] = time.perf_counter
    watch: ProgressListener = ignore_progress

    def begin(self, ratio: float = 1.0) -> Deadline:
        """Begin the time limit, or a share of it."""
        return Deadline(begun_s=self.clock(), limit_s=ratio * self.time_limit_s, clock=self.clock)

    def until(self, deadline: Deadline) -> "SearchSettings":
        """Return settings with what is left of a time limit that has begun."""
        return replace(self, time_limit_s=deadline.left_s)
