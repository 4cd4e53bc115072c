"""Progress of a planner: its stage, and how far that has come."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningEvent:
    """One line about the current work."""

    stage: str
    """Stage of the work in one word, e.g. `search`."""
    text: str


class ProgressListener(Protocol):
    """Called in order, from the thread that plans."""

    def __call__(self, event: PlanningEvent, /) -> None: ...


def ignore_progress(_event: PlanningEvent, /) -> None:
    """Ignore the event."""
