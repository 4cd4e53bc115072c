"""Progress on stderr: on a terminal a line that changes and goes, in a log plain lines.

A measurement shows a bar with the time left, a plan the stage of the search.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tuner.units import format_s

if TYPE_CHECKING:
    from profilers.progress import Progress, ProgressEvent
    from tuner.planner.progress import Told, Watch


@contextmanager
def watched() -> "Iterator[Progress]":
    """Give what a measurement reports to, for as long as it runs."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        TextColumn("{task.description:<13}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]} left"),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("starting", total=None, left="")

        def show(event: "ProgressEvent", /) -> None:
            bar.update(
                task,
                description=event.table,
                completed=event.done,
                total=event.total,
                left=format_s(max(0.0, event.left_s)),
            )

        yield show


class _Lines:
    """One line when a table begins and one when all its known cases are done."""

    def __init__(self) -> None:
        self._table = ""

    def __call__(self, event: "ProgressEvent", /) -> None:
        if event.table != self._table:
            self._table = event.table
            left = format_s(max(0.0, event.left_s))
            print(f"measuring {event.table}, {left} left", file=sys.stderr, flush=True)


@contextmanager
def planning() -> "Iterator[Watch]":
    """Give what a planner tells its stages to, for as long as it runs."""
    if not sys.stderr.isatty():
        yield _log
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    bar = Bar(
        SpinnerColumn(),
        TextColumn("{task.description:<8} {task.fields[text]}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("reading", total=None, text="")

        def show(told: "Told", /) -> None:
            bar.update(task, description=told.stage, text=told.text)

        yield show


def _log(told: "Told", /) -> None:
    """One line per stage; what is soon out of date is left out."""
    if not told.is_passing:
        print(f"{told.stage}: {told.text}", file=sys.stderr, flush=True)
