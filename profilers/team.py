"""The ranks that measure together, as one of them sees it.

Every decision (what to measure next, when to stop) is taken by rank 0 and broadcast, so that ranks
can neither diverge nor wait for each other forever. `Alone` is a team of one and needs no library;
the team over torch.distributed is in profilers/links/team.py.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Team(Protocol):
    """Processes that took the same steps so far; every method is called by all of them."""

    @property
    def rank(self) -> int:
        """This process, from 0."""

    @property
    def world(self) -> int:
        """How many there are."""

    @property
    def local_world(self) -> int:
        """How many of them share this node."""

    def barrier(self) -> None:
        """Wait until all have come here."""

    def decided(self, value: T) -> T:
        """Rank 0's value, on every rank."""

    def gathered(self, value: T) -> tuple[T, ...]:
        """Every rank's value in rank order on rank 0, nothing on the others."""

    def slowest_s(self, times_s: Sequence[float]) -> tuple[float, ...]:
        """Element by element, the largest over the ranks; the same on every rank."""


class Alone:
    """A team of one."""

    rank = 0
    world = 1
    local_world = 1

    def barrier(self) -> None:
        """Nobody to wait for."""

    def decided(self, value: T) -> T:
        return value

    def gathered(self, value: T) -> tuple[T, ...]:
        return (value,)

    def slowest_s(self, times_s: Sequence[float]) -> tuple[float, ...]:
        return tuple(times_s)

    def close(self) -> None:
        """Nobody to leave."""
