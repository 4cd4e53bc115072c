"""The ranks that measure together, as one of them sees it.

Every decision (what to measure next, when to stop) is taken by rank 0 and broadcast, so that ranks
can neither diverge nor wait for each other forever. `SingleRank` is a team of one and needs no
library; the team over torch.distributed is in profilers/links/team.py.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")

AllReduceMax = Callable[[Sequence[float]], Sequence[float]]
"""Element by element the largest over the ranks that measure in lockstep; all of them call it, and
none goes on before the last one has. `tuple` is that of a rank by itself."""


class Team(Protocol):
    """Processes that took the same steps so far; all of them call every method."""

    @property
    def rank(self) -> int:
        """This process, from 0."""

    @property
    def world(self) -> int:
        """Return the number of ranks."""

    @property
    def local_world(self) -> int:
        """Return the number of ranks on this node."""

    def barrier(self) -> None:
        """Wait until all have come here."""

    def decided(self, value: T) -> T:
        """Rank 0's value, on every rank."""

    def gathered(self, value: T) -> tuple[T, ...]:
        """Every rank's value in rank order on rank 0, nothing on the others."""

    def slowest_s(self, times_s: Sequence[float]) -> tuple[float, ...]:
        """Element by element, the largest over the ranks; the same on every rank."""


class SingleRank:
    """A team of one rank."""

    rank = 0
    world = 1
    local_world = 1

    def barrier(self) -> None:
        """There is nothing to wait for."""

    def decided(self, value: T) -> T:
        return value

    def gathered(self, value: T) -> tuple[T, ...]:
        return (value,)

    def slowest_s(self, times_s: Sequence[float]) -> tuple[float, ...]:
        return tuple(times_s)

    def close(self) -> None:
        """There is nothing to close."""
