"""Classifies the end of a job, and what its trial's folder says of it.

The files in the folder of such a trial are ticket, lease, report and exit code. Nodes write there
too, and a shared file system may show a file late: an unreadable file counts as not yet written.
"""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from profilers.files import read_bounded
from profilers.records import Record
from profilers.steps.config import StepReport
from tuner.output import write_files
from tuner.plans.folder import MAX_RECORD_BYTES
from tuner.units import format_s
from tuner.verify.launcher import (
    LOG_NAME,
    REPORT_NAME,
    Launch,
    LaunchResult,
    early_result,
    exit_result,
    failure_result,
    log_tail,
    steps_so_far,
    timeout_result,
)
from tuner.verify.slurm.queue import LOST_NODE, WAITING, JobState
from tuner.verify.slurm.script import (
    ABANDONED_EXIT,
    EXIT_NAME,
    LEASE_NAME,
    LOST_NODE_EXIT,
    MOST_RESTARTS,
)

TICKET_NAME: Final = "ticket.json"
WITHDRAWN_NAME: Final = "withdrawn"

NODE_GONE: Final = "a node of the job could not be reached any more"
JOB_GONE: Final = "Slurm does not know the job any more, and it left no report"
ENDED_AS: Final = "Slurm says {} of the job"
LOST_JOB: Final = frozenset({NODE_GONE, JOB_GONE, *map(ENDED_AS.format, LOST_NODE)})
"""Reasons of a job that was lost, whatever its trial is."""


class Ticket(Record):
    """`ticket.json`: name and id of a trial's job."""

    name: str
    job: str | None = None
    losses: int = 0
    """Losses of the trial; written by former releases, which submitted lost trials again."""


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


SLURMS_LIMITS: Final[Mapping[str, str]] = {"TIMEOUT": "time", "DEADLINE": "deadline"}
"""Sbatch option of the limit behind a state; the default is in the job script."""


def check_overrun(
    state: JobState, launch: Launch, folder: Path, *, wall_s: float
) -> LaunchResult | None:
    """Return the result of a running job that must be ended; None while it may run on."""
    if state.restarts > MOST_RESTARTS:
        return _crash(f"{state.restarts} of its nodes failed", wall_s=wall_s)
    if state.state not in WAITING and state.run_s > launch.deadline_s:
        steps = len(steps_so_far(folder))
        return timeout_result(launch.deadline_s, wall_s=state.run_s, steps=steps)
    if wall_s > launch.latest_s:
        return _late(state, wall_s=wall_s)
    if reason := launch.hopeless(steps_so_far(folder)):
        return early_result(folder, reason=reason, wall_s=wall_s)
    return None


def job_result(state: JobState | None, folder: Path, *, wall_s: float) -> LaunchResult:
    """Return the result of a job that ended without a readable report."""
    code, tail = exit_code(folder), log_tail(folder / LOG_NAME)
    if state is not None and state.state == "OUT_OF_MEMORY":
        reason = "Slurm ended the job for lack of memory"
        return LaunchResult(status="out_of_memory", reason=reason, report=None, wall_s=wall_s)
    if state is not None and state.state in SLURMS_LIMITS:
        reason = _limit_of(state)
        return LaunchResult(status="timeout", reason=reason, report=None, wall_s=wall_s)
    if code == ABANDONED_EXIT:
        return _crash("the job ended itself: nobody renewed its lease", wall_s=wall_s)
    if code == LOST_NODE_EXIT:
        return _crash(NODE_GONE, wall_s=wall_s)
    if code is not None:
        # Shells report 128 + n for signal n.
        code = 128 - code if code > 128 else code
        return exit_result(code, tail=tail, report_file=folder / REPORT_NAME, wall_s=wall_s)
    if state is None:
        return _crash(JOB_GONE, wall_s=wall_s)
    if state.state in LOST_NODE or state.state == "CANCELLED":
        return _crash(ENDED_AS.format(state.state), wall_s=wall_s)
    return failure_result(1, tail=tail, wall_s=wall_s)


def _limit_of(state: JobState) -> str:
    """Name the Slurm limit that ended a job, as opposed to the trial's own deadline."""
    option = SLURMS_LIMITS[state.state]
    name = "time limit" if option == "time" else option
    limit = f" of {format_s(state.limit_s)}" if option == "time" and state.limit_s else ""
    return (
        f"no report when Slurm ended the job at its {name}{limit}; allow more with"
        f" --slurm {option}=..."
    )


def _late(state: JobState, *, wall_s: float) -> LaunchResult:
    did = "waited for its nodes" if state.state in WAITING else "ran"
    reason = f"the budget was over while the job {did}; it was ended"
    return LaunchResult(status="timeout", reason=reason, report=None, wall_s=wall_s)


def _crash(reason: str, *, wall_s: float) -> LaunchResult:
    return LaunchResult(status="crashed", reason=reason, report=None, wall_s=wall_s)
