"""Progress on stderr: a line that is updated and removed on a terminal; nothing in a pipe.

A measurement shows how much is done and the time left, a plan the stage of its search, the time
passed and its limit. Colours are Rich's, which leaves them out where NO_COLOR is set.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tuner.report.printable import printable
from tuner.units import format_s

if TYPE_CHECKING:
    from profilers.progress import Progress, ProgressEvent
    from tuner.search.progress import PlanningEvent, ProgressListener


@contextmanager
def measurement_progress() -> "Iterator[Progress]":
    """Yield the listener of a measurement's progress."""
    from tuner.search.progress import PlanningEvent

    with planning_progress("starting") as listen:

        def show(event: "ProgressEvent", /) -> None:
            left = format_s(max(0.0, event.left_s))
            text = f"{event.done} of {event.total}, {left} left"
            listen(PlanningEvent(stage=event.table, text=text))

        yield show


@contextmanager
def planning_progress(
    stage: str = "reading", *, text: str = "", limit_s: float | None = None
) -> "Iterator[ProgressListener]":
    """Yield the listener of the stages of long work.

    Args:
        stage: the first one.
        text: of the first stage.
        limit_s: time limit of the work; None: only what has passed is shown.
    """
    if not sys.stderr.isatty():
        yield _quiet
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Column

    bar = Bar(
        SpinnerColumn(),
        # On a narrow terminal the text is cut, not the time.
        TextColumn(
            "{task.description:<8} {task.fields[text]}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1),
        ),
        TimeElapsedColumn(),
        TextColumn("" if limit_s is None else f"of {limit_s:.0f} s"),
        console=Console(stderr=True),
        transient=True,
        expand=True,
    )
    with bar:
        task = bar.add_task(stage, total=None, text=printable(text))

        def show(event: "PlanningEvent", /) -> None:
            bar.update(task, description=event.stage, text=printable(event.text))

        yield show


def _quiet(_event: "PlanningEvent", /) -> None:
    """Ignore the event: stderr is no terminal."""
