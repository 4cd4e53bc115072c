"""Progress of a measurement on stderr: a bar with the time left, or plain lines in a log."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tuner.units import format_s

if TYPE_CHECKING:
    from profilers.progress import Progress, ProgressEvent


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
