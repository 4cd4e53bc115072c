"""Sources of time: a processor's monotonic counter, or an accelerator's events.

The clock of an accelerator is `profilers.devices.DeviceClock`, that of a collective
`profilers.links.suite.TeamClock`.
"""

import resource
import time
from collections.abc import Sequence
from typing import Final, Protocol

MAX_LOOPS: Final = 1000
"""Runs of one repeat, at most."""


class Clock(Protocol):
    """Marks on a device, and the time between them."""

    def now_s(self) -> float:
        """Read the host's clock, to keep to a budget."""

    def mark(self) -> object:
        """Mark the present point on the device."""

    def between_s(self, pairs: Sequence[tuple[object, object]]) -> tuple[float, ...]:
        """Wait until all marks are passed; seconds between each pair."""

    def page_faults(self) -> int:
        """Pages mapped for this process so far; 0 where mapping them takes no time."""

    def hold(self, seconds: float) -> None:
        """Keep the device busy, so that what is queued meanwhile never waits for the host."""

    @property
    def most_queued(self) -> int:
        """Runs that a repeat may loop: as many as can be queued while the device is held."""


class HostClock:
    """The processor's monotonic counter."""

    def now_s(self) -> float:
        return time.perf_counter()

    def mark(self) -> object:
        return time.perf_counter()

    def between_s(self, pairs: Sequence[tuple[object, object]]) -> tuple[float, ...]:
        return tuple(float(last) - float(first) for first, last in pairs)  # type: ignore[arg-type]  # marks are our own floats

    def hold(self, seconds: float) -> None:
        pass

    @property
    def most_queued(self) -> int:
        return MAX_LOOPS

    def page_faults(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
