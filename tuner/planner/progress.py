"""What a planner tells whoever watches it: the stage it is in, and how far that has come."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One line about the work at hand."""

    stage: str
    """One word, e.g. `search`."""
    text: str
    is_passing: bool = False
    """Soon out of date; a log does without it."""


class Watch(Protocol):
    """Called in order, from the thread that plans."""

    def __call__(self, told: Told, /) -> None: ...


def unwatched(_told: Told, /) -> None:
    """Watch nothing."""
