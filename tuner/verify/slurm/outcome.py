"""How a job ended: what is a result of its trial, and what says nothing of it.

A trial is lost, and may be submitted anew, where its node failed or Slurm does not know its job
any more, and it has left no exit code of its own. Whatever else ends a job without a report is a
result: it would happen again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tuner.units import format_s
from tuner.verify.launcher import (
    LOG_NAME,
    REPORT_NAME,
    Launch,
    LaunchResult,
    ended_early,
    failure,
    judge,
    log_tail,
    timed_out,
)
from tuner.verify.progress import steps_so_far
from tuner.verify.slurm.folder import Ticket, exit_code
from tuner.verify.slurm.queue import LOST_NODE, WAITING, JobState
from tuner.verify.slurm.script import ABANDONED_EXIT, LOST_NODE_EXIT, MOST_RESTARTS

SLURMS_LIMITS: Final[Mapping[str, str]] = {"TIMEOUT": "time", "DEADLINE": "deadline"}
"""Option of sbatch that sets the limit behind a state; without one it is the job script's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A job that ended without saying anything of its trial."""

    restarts: int
    """How often Slurm had queued it again before."""


def lost_of(state: JobState | None, folder: Path) -> Lost | None:
    """Tell a job that is over for reasons that are none of the trial's; None where it is not."""
    restarts = state.restarts if state is not None else 0
    code = exit_code(folder)
    if code == LOST_NODE_EXIT:
        return Lost(restarts=restarts)
    is_gone = state is None or state.state in LOST_NODE
    return Lost(restarts=restarts) if code is None and is_gone else None


def overrun_of(
    state: JobState, launch: Launch, folder: Path, *, ticket: Ticket, wall_s: float
) -> LaunchResult | None:
    """Say why a job that is alive has to be ended; None while it may go on."""
    losses = ticket.losses + state.restarts
    if losses > MOST_RESTARTS:
        return _crash(f"{losses} of its nodes failed", wall_s=wall_s)
    if state.state not in WAITING and state.run_s > launch.deadline_s:
        steps = len(steps_so_far(folder))
        return timed_out(launch.deadline_s, wall_s=state.run_s, steps=steps)
    if wall_s > launch.latest_s:
        return _late(state, wall_s=wall_s)
    if reason := launch.hopeless(steps_so_far(folder)):
        return ended_early(folder, reason=reason, wall_s=wall_s)
    return None


def ended_as(state: JobState | None, folder: Path, *, wall_s: float) -> LaunchResult:
    """Judge a job that is over and has left no report that could be read."""
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
        return _crash("a node of the job could not be reached any more", wall_s=wall_s)
    if code is not None:
        # A shell says 128 + n of what signal n has ended.
        code = 128 - code if code > 128 else code
        return judge(code, tail=tail, report_file=folder / REPORT_NAME, wall_s=wall_s)
    if state is None:
        return _crash("Slurm does not know the job any more, and it left no report", wall_s=wall_s)
    if state.state in LOST_NODE or state.state == "CANCELLED":
        return _crash(f"Slurm says {state.state} of the job", wall_s=wall_s)
    return failure(1, tail=tail, wall_s=wall_s)


def _limit_of(state: JobState) -> str:
    """Say which limit of Slurm ended a job; the trial's own deadline is none of them."""
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
