"""Files in the folder of a trial that runs as a Slurm job: ticket, lease, exit code.

Nodes write there too, and a shared file system may show a file late: an unreadable file counts as
not yet written.
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
from tuner.plans.folder import MAX_RECORD_BYTES
from tuner.verify.launcher import REPORT_NAME
from tuner.verify.slurm.script import EXIT_NAME, LEASE_NAME

TICKET_NAME: Final = "ticket.json"
WITHDRAWN_NAME: Final = "withdrawn"


class Ticket(Record):
    """`ticket.json`: name and id of a trial's job."""

    name: str
    job: str | None = None
    losses: int = 0
    """How often the trial was lost before this job, by a node or a controller failure."""


def read_report(folder: Path) -> StepReport | None:
    """Return the report of a successful run."""
    if exit_code(folder) != 0:
        return None
    try:
        return StepReport.model_validate_json(
            read_bounded(folder / REPORT_NAME, most_bytes=MAX_RECORD_BYTES)
        )
    except (OSError, ValidationError):
        return None


def exit_code(folder: Path) -> int | None:
    """Return the exit code that the batch script recorded for the last run; None until then."""
    try:
        return int(read_bounded(folder / EXIT_NAME, most_bytes=64))
    except (OSError, ValueError):
        return None


def renew_lease(folder: Path) -> None:
    """Renew the lease; nodes check whether it changes."""
    with contextlib.suppress(OSError):  # A disk that is briefly full must not end a trial.
        partial = folder / f".{LEASE_NAME}.partial"
        partial.write_text(f"{time.time_ns()}\n", encoding="ascii")
        partial.replace(folder / LEASE_NAME)


def read_ticket(folder: Path) -> Ticket | None:
    """Return the ticket; None if no job was prepared."""
    try:
        return Ticket.model_validate_json(
            read_bounded(folder / TICKET_NAME, most_bytes=MAX_RECORD_BYTES)
        )
    except (OSError, ValidationError):
        return None


def write_ticket(folder: Path, ticket: Ticket) -> None:
    """Write the ticket atomically."""
    write_files(folder, {TICKET_NAME: ticket.model_dump_json() + "\n"})
