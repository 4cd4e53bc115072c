"""Progress events of a running measurement."""

from typing import Protocol

from profilers.records import Record


class ProgressEvent(Record):
    """One case is done, or a table is."""

    table: str
    done: int
    """Cases of the table that are measured or skipped."""
    total: int
    """Cases of the table as far as they are known; refinement adds some."""
    left_s: float
    """Time left of the whole budget."""
    case: str = ""
    """The case that was just measured."""


class Progress(Protocol):
    """Called on the process that the user started, in order."""

    def __call__(self, event: ProgressEvent, /) -> None: ...


def silent(_event: ProgressEvent, /) -> None:
    """Watch nothing."""
