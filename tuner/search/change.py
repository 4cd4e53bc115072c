"""Changes of a spec, a problem or a launch, and the least one that helps.

Relaxations, more nodes and advice are the least change that helps: changes of one kind are tried in
ascending order, and the first with a solution is the answer. The caller defines what a solution is.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Changed = TypeVar("Changed")
Solution = TypeVar("Solution")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Generic[Changed]):
    """A limit or knob at another setting."""

    limit: str
    """Name of the limit or knob that is changed."""
    words: str
    """Change in words."""
    apply: Callable[[Changed], Changed]


def first_solution(
    changes: Iterable[Change[Changed]], solve: Callable[[Change[Changed]], Solution | None]
) -> Solution | None:
    """Return the solution of the first change that yields one, else None."""
    solutions = (solution for change in changes if (solution := solve(change)) is not None)
    return next(solutions, None)
