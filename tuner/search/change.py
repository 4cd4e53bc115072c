"""Changes of a spec, a problem or a launch, and the least one with which something holds.

Relaxations, more nodes, what-ifs and advice are all the least change that helps: changes of one
kind are tried in ascending order, and the first with a solution is the answer. What a solution is,
and what it costs, whoever tries them knows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Changed = TypeVar("Changed")
Solution = TypeVar("Solution")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Generic[Changed]):
    """One thing at another setting, everything else as it is."""

    limit: str
    """Name of the limit or knob that is changed."""
    words: str
    """Change in words."""
    apply: Callable[[Changed], Changed]


def least(
    changes: Iterable[Change[Changed]], solve: Callable[[Change[Changed]], Solution | None]
) -> Solution | None:
    """Return the solution with the first change that has one; None where none has."""
    return next((made for change in changes if (made := solve(change)) is not None), None)
