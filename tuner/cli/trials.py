"""Trials on stderr while they run: a live table with the time left; plain lines in a log."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tuner.cli.text import print_stderr
from tuner.config.train_words import short_decision
from tuner.report.printable import printable
from tuner.units import format_s
from tuner.verify.identical_failures import failure_cause
from tuner.verify.verification import Watcher

if TYPE_CHECKING:
    from rich.table import Table

    from tuner.config.train import TrainDecision
    from tuner.verify.records import TrialRecord

HEADER = ("trial", "decision", "from", "predicted", "measured", "status")


@contextmanager
def live_table(*, total: int) -> Iterator[Watcher]:
    """Show launches as they begin and end."""
    causes = _Causes()
    if not sys.stderr.isatty():
        yield Watcher(started=_say_started, ended=lambda record: _say_ended(record, causes))
        return
    from rich.console import Console
    from rich.live import Live

    rows: list[tuple[str, ...]] = []
    begun_s = time.monotonic()
    with Live(console=Console(stderr=True), auto_refresh=False) as live:

        def started(decision: "TrainDecision", predicted_s: float) -> None:
            left = time_left(time.monotonic() - begun_s, ended=len(rows), total=total)
            running = (short_decision(decision), "", format_s(predicted_s), "", f"running{left}")
            live.update(_table([*rows, (f"{len(rows) + 1}/{total}", *running)]), refresh=True)

        def ended(record: "TrialRecord") -> None:
            rows.append((f"{len(rows) + 1}/{total}", *_cells(record, causes)))
            live.update(_table(rows), refresh=True)

        yield Watcher(started=started, ended=ended)


def time_left(elapsed_s: float, *, ended: int, total: int) -> str:
    """Format the time left, if launches take as long as those so far."""
    if not ended:
        return ""
    return f", about {format_s(elapsed_s / ended * max(0, total - ended))} left"


def _table(rows: list[tuple[str, ...]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(*HEADER, box=None)
    for row in rows:
        # As text, so that no cell is read as markup.
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


class _Causes:
    """Failure causes already printed, so that each is printed once."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def words(self, record: "TrialRecord") -> str:
        """Format how a trial ended, with its reason unless that was printed before."""
        cause = failure_cause(record)
        if cause and cause in self._printed:
            return f"{record.status} like the one before"
        self._printed.add(cause)
        return f"{record.status}: {record.reason}" if record.reason else record.status


def _cells(record: "TrialRecord", causes: _Causes) -> tuple[str, ...]:
    measured = "" if record.measured_step_s is None else format_s(record.measured_step_s)
    launched = record.decision if record.scale is None else record.scale.decision
    return (
        short_decision(launched),
        record.origin,
        format_s(record.predicted_step_s),
        measured,
        causes.words(record),
    )


def _say_started(decision: "TrainDecision", predicted_s: float) -> None:
    line = f"launching {short_decision(decision)}, {format_s(predicted_s)} a step predicted"
    print_stderr(line)


def _say_ended(record: "TrialRecord", causes: _Causes) -> None:
    _, _, predicted, measured, status = _cells(record, causes)
    took = f"{measured} measured" if measured else "not measured"
    print_stderr(f"  {status}: {took}, {predicted} predicted")
