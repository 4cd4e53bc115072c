"""Trials on stderr while they run: a table that grows, with the time left; in a log each result."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tuner.cli.text import printable, tell
from tuner.train_words import short_decision
from tuner.units import format_s
from tuner.verify.identical_failures import cause_of
from tuner.verify.verification import Watcher

if TYPE_CHECKING:
    from rich.table import Table

    from tuner.plan import TrainDecision
    from tuner.verify.records import TrialRecord

HEADER = ("trial", "decision", "from", "predicted", "measured", "status")


@contextmanager
def live_table(*, total: int) -> Iterator[Watcher]:
    """Show launches as they begin and end."""
    said = _Causes()
    if not sys.stderr.isatty():
        yield Watcher(started=_say_started, ended=lambda record: _say_ended(record, said))
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
            rows.append((f"{len(rows) + 1}/{total}", *_cells(record, said)))
            live.update(_table(rows), refresh=True)

        yield Watcher(started=started, ended=ended)


def time_left(elapsed_s: float, *, ended: int, total: int) -> str:
    """Say how long the launches that are left take if they take as long as those before."""
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
    """What failed trials were said to have failed of, so that each cause is said once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def words(self, record: "TrialRecord") -> str:
        """Say how a trial ended, and why where that was not said before."""
        cause = cause_of(record)
        if cause and cause in self._said:
            return f"{record.status} like the one before"
        self._said.add(cause)
        return f"{record.status}: {record.reason}" if record.reason else record.status


def _cells(record: "TrialRecord", said: _Causes) -> tuple[str, ...]:
    measured = "" if record.measured_step_s is None else format_s(record.measured_step_s)
    launched = record.decision if record.scale is None else record.scale.decision
    return (
        short_decision(launched),
        record.origin,
        format_s(record.predicted_step_s),
        measured,
        said.words(record),
    )


def _say_started(decision: "TrainDecision", predicted_s: float) -> None:
    line = f"launching {short_decision(decision)}, {format_s(predicted_s)} a step predicted"
    tell(line)


def _say_ended(record: "TrialRecord", said: _Causes) -> None:
    _, _, predicted, measured, status = _cells(record, said)
    took = f"{measured} measured" if measured else "not measured"
    tell(f"  {status}: {took}, {predicted} predicted")
