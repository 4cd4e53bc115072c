"""Client of Slurm: sbatch, scontrol or sacct, squeue and scancel, each with a time limit.

The state of a job comes from `scontrol show job --oneliner` or, if that no longer knows the job or
no controller responds, from `sacct`; the first reply counts. Formats are those of scontrol(1) and
sacct(1). A program that cannot reach its daemon raises `SlurmAwayError`: the state is unknown then,
and a retry is worthwhile.

A controller that lost its state reuses ids, so a job is always looked up by id and name.
"""

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tuner.errors import EnvironmentMissingError, SchedulerError

PROGRAMS: Final = ("sbatch", "scontrol", "squeue", "scancel")
REPLY_TIMEOUT_S: Final = 60.0
"""Timeout of a command; Slurm's own programs give up on a silent controller after about as long."""

WAITING: Final = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
)
GOING: Final = frozenset(
    {"RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"}
)
LOST_NODE: Final = frozenset({"NODE_FAIL", "PREEMPTED", "BOOT_FAIL"})
"""Ends outside the trial's control, after which Slurm may requeue the job."""

_FIELD: Final = re.compile(r"(?<!\S)([A-Za-z]+)=(\S*)")
_ELAPSED: Final = re.compile(r"(?:(\d+)-)?(\d+):(\d+):(\d+)")
_JOB_ID: Final = re.compile(r"\d{1,12}")
_REFUSALS: Final = re.compile(
    r"batch job submission failed: (?!unable to contact|socket timed out|zero bytes|unexpected"
    r"|communication|connection|slurm temporarily|resource temporarily|unspecified)"
    r"|unrecognized option|invalid (?!job id)|requested .* not available",
    re.IGNORECASE,
)


class SlurmAwayError(Exception):
    """Slurm does not respond at the moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """State of a job according to Slurm."""

    state: str
    reason: str = ""
    """Why it waits."""
    run_s: float = 0.0
    """Duration of its current run."""
    restarts: int = 0
    limit_s: float = 0.0
    """Slurm's time limit of a run; 0 if unknown."""

    @property
    def is_alive(self) -> bool:
        """Return whether the job runs or may run."""
        return self.state in WAITING or self.state in GOING


def check_programs() -> None:
    """Refuse where Slurm is not installed.

    Raises:
        EnvironmentMissingError: a program is not on the path.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise EnvironmentMissingError(
            f"--launcher slurm needs {missing[0]}, which is not on the path: start moetune on a"
            " machine from which jobs are submitted"
        )


def submit(script: Path, *, output: Path, environment: Mapping[str, str]) -> str:
    """Submit a batch script and return the job's id.

    Raises:
        SlurmAwayError: no controller responds; the job may have been accepted nevertheless.
        SchedulerError: Slurm refuses the job.
    """
    # The log's name is a pattern to sbatch.
    log = str(output).replace("%", "%%")
    done = _run(
        ["sbatch", "--parsable", f"--output={log}", f"--chdir={script.parent}", str(script)],
        environment=environment,
    )
    # With several clusters the reply is ID;CLUSTER.
    match = _JOB_ID.match(done.stdout.strip())
    if done.returncode == 0 and match:
        return match.group()
    if _REFUSALS.search(done.stderr):
        raise SchedulerError(f"sbatch refuses the trial: {_said(done)}")
    raise SlurmAwayError(_said(done))


def job_state(job: str, *, name: str) -> JobState | None:
    """Return the state of the job with an id and a name; None where Slurm knows none (any more).

    Raises:
        SlurmAwayError: neither program responds.
    """
    shown = _run(["scontrol", "show", "job", "--oneliner", job])
    if shown.returncode == 0:
        return parse_scontrol(shown.stdout, name=name)
    listed = _sacct(job, name=name)
    if listed is not None:
        return listed
    if "invalid job id" in f"{shown.stdout}{shown.stderr}".lower():
        return None
    raise SlurmAwayError(_said(shown))


def find_job(name: str) -> str | None:
    """Return the id of the job with a name; None where none has it.

    Raises:
        SlurmAwayError: no controller responds.
    """
    done = _run(["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i"])
    if done.returncode != 0:
        raise SlurmAwayError(_said(done))
    jobs = [line.strip() for line in done.stdout.splitlines() if _JOB_ID.fullmatch(line.strip())]
    return jobs[-1] if jobs else None


def cancel(job: str, *, name: str) -> None:
    """Cancel the job with an id and a name, unless it has ended already.

    Raises:
        SlurmAwayError: no controller responds.
    """
    done = _run(["scancel", f"--name={name}", job])
    if done.returncode != 0 and "invalid job id" not in done.stderr.lower():
        raise SlurmAwayError(_said(done))


def parse_scontrol(text: str, *, name: str) -> JobState | None:
    """Read the line of `scontrol show job --oneliner`; None where it is of another job."""
    line = next((one for one in text.splitlines() if "JobState=" in one), "")
    fields = dict(reversed(_FIELD.findall(line)))
    if "JobState" not in fields or fields.get("JobName") != name:
        return None
    restarts = fields.get("Restarts", "0")
    return JobState(
        state=fields["JobState"],
        reason=fields.get("Reason", ""),
        run_s=_elapsed_s(fields.get("RunTime", "")),
        restarts=int(restarts) if restarts.isdigit() else 0,
        limit_s=_elapsed_s(fields.get("TimeLimit", "")),
    )


def parse_sacct(text: str, *, name: str) -> JobState | None:
    """Read the last line of `sacct`: JobName, State, ElapsedRaw and Timelimit between bars."""
    lines = [line.split("|") for line in text.splitlines() if line.strip()]
    if not lines or len(lines[-1]) < 4 or lines[-1][0] != name or not lines[-1][1].strip():
        return None
    state, elapsed, limit = lines[-1][1:4]
    return JobState(
        # E.g. `CANCELLED by 1000`.
        state=state.split()[0],
        run_s=float(elapsed) if elapsed.isdigit() else 0.0,
        limit_s=_elapsed_s(limit),
    )


def _sacct(job: str, *, name: str) -> JobState | None:
    if shutil.which("sacct") is None:
        return None
    done = _run(
        [
            "sacct",
            "-X",
            "--noheader",
            "--parsable2",
            f"--jobs={job}",
            "--format=JobName%64,State,ElapsedRaw,Timelimit",
        ]
    )
    return parse_sacct(done.stdout, name=name) if done.returncode == 0 else None


def _elapsed_s(text: str) -> float:
    """Read [days-]hours:minutes:seconds; 0 where it is anything else, e.g. UNLIMITED."""
    match = _ELAPSED.fullmatch(text)
    if not match:
        return 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _run(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=REPLY_TIMEOUT_S,
            check=False,
            env=environment,
            # Ctrl-C is for this process only; running Slurm commands complete.
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmAwayError(
            f"{command[0]} did not respond within {REPLY_TIMEOUT_S:.0f} s"
        ) from error
    except FileNotFoundError as error:
        raise EnvironmentMissingError(f"{command[0]} is not on the path any more") from error


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """Return the first line of a program's error message, without its name."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    line = next((one for one in lines if "error" in one.lower()), lines[0] if lines else "")
    return re.sub(r"^\w+: (error: )?", "", line)[:300] or f"exit code {done.returncode}"
