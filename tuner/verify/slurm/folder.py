"""What lies in the folder of a trial that is a job: its ticket, its lease, its end.

Nodes write too, and a file system that they share may show a file late: what cannot be read is not
there yet.
"""

import contextlib
import time
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from profilers.files import read_bounded
from profilers.records import Record
from profilers.steps.config import StepReport
from tuner.output import write_files
from tuner.verify.launcher import REPORT_NAME
from tuner.verify.records import MAX_RECORD_BYTES
from tuner.verify.slurm.script import EXIT_NAME, LEASE_NAME

TICKET_NAME: Final = "ticket.json"
WITHDRAWN_NAME: Final = "withdrawn"


class Ticket(Record):
    """`ticket.json`: how the job of a trial is found."""

    name: str
    job: str | None = None
    losses: int = 0
    """How often the trial was lost before this job, with a node or by a controller."""


def report_of(folder: Path) -> StepReport | None:
    """The report of a run that ended well."""
    if exit_code(folder) != 0:
        return None
    try:
        return StepReport.model_validate_json(
            read_bounded(folder / REPORT_NAME, most_bytes=MAX_RECORD_BYTES)
        )
    except (OSError, ValidationError):
        return None


def exit_code(folder: Path) -> int | None:
    """Of the last run, as the batch script saw it; None while there is none."""
    try:
        return int(read_bounded(folder / EXIT_NAME, most_bytes=64))
    except (OSError, ValueError):
        return None


def renew_lease(folder: Path) -> None:
    """Change the lease; nodes look whether it is another than before."""
    with contextlib.suppress(OSError):  # A disk that is full for a moment must not end a trial.
        partial = folder / f".{LEASE_NAME}.partial"
        partial.write_text(f"{time.time_ns()}\n", encoding="ascii")
        partial.replace(folder / LEASE_NAME)


def ticket_of(folder: Path) -> Ticket | None:
    """The ticket; None where nothing was prepared."""
    try:
        return Ticket.model_validate_json(
            read_bounded(folder / TICKET_NAME, most_bytes=MAX_RECORD_BYTES)
        )
    except (OSError, ValidationError):
        return None


def write_ticket(folder: Path, ticket: Ticket) -> None:
    """Write it, whole or not at all."""
    write_files(folder, {TICKET_NAME: ticket.model_dump_json() + "\n"})
