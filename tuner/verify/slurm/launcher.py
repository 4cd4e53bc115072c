"""Runs the reference step of each trial as a job of Slurm, and sees to its end.

The trial's folder lies on a file system that all nodes share. Its `ticket.json` names the job
before anybody waits for it: first the name, then, once sbatch has answered, the id. So whoever
resumes after a kill finds the job by its id or, had the kill come between the two, by its name.

    submitted -> waits in the queue (bounded) -> runs (bounded by its deadline) -> report or failure
                        ^                            |
                        +---- a node failed or the job was preempted, at most MOST_RESTARTS times

While a trial is awaited its `lease` is renewed; a job whose lease stays the same ends itself. When
this process is told to end, jobs are cancelled first. A controller that is away is asked again for
`patience_s`; a report that lies there with exit code 0 needs no controller.

Not covered: clusters whose nodes do not share the plan's folder; arrays (every trial has a shape of
its own); federations of several clusters.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from pydantic import ValidationError

from profilers.records import Record
from profilers.steps.config import StepReport
from tuner.errors import SchedulerError
from tuner.launch.shape import launch_shape
from tuner.output import write_files
from tuner.units import format_s
from tuner.verify.launcher import (
    CONFIG_NAME,
    LOG_NAME,
    REPORT_NAME,
    Launch,
    LaunchResult,
    failure,
    judge,
    log_tail,
    timed_out,
)
from tuner.verify.slurm import queue
from tuner.verify.slurm.options import Options
from tuner.verify.slurm.queue import LOST_NODE, WAITING, JobState, SlurmAwayError
from tuner.verify.slurm.script import (
    ABANDONED_EXIT,
    EXIT_NAME,
    JOB_NAME,
    LEASE_NAME,
    LOST_NODE_EXIT,
    MOST_RESTARTS,
    NODE_NAME,
    job_script,
    node_script,
)

Answer = TypeVar("Answer")

TICKET_NAME: Final = "ticket.json"
WITHDRAWN_NAME: Final = "withdrawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long is waited for what, in seconds."""

    poll_s: float = 2.0
    """Between two looks at a job."""
    lease_s: float = 300.0
    """A job goes on for so long when nobody waits for it any more."""
    patience_s: float = 600.0
    """For a controller that does not answer."""
    queue_s: float = 24 * 3600.0
    """That a trial may wait for its nodes."""
    settle_s: float = 30.0
    """For a failed node's job to be queued again, and for a cancelled job to end."""


class Ticket(Record):
    """`ticket.json`: how the job of a trial is found."""

    name: str
    job: str | None = None


class SlurmLauncher:
    """A `DurableLauncher`; a resource with jobs behind it, which `stop` cancels."""

    def __init__(
        self,
        *,
        options: Options = (),
        requeue: bool = True,
        pace: Pace | None = None,
        environment: Mapping[str, str],
        told: Callable[[str], None],
    ) -> None:
        """Say how jobs are submitted.

        Args:
            options: the user's, of sbatch.
            requeue: whether a job is started again after a node failed or it was preempted.
            pace: how long is waited for what.
            environment: that sbatch hands on to the job.
            told: hears a line whenever a job changes its state.
        """
        self._options = options
        self._requeue = requeue
        self._pace = pace or Pace()
        self._environment = dict(environment)
        self._told = told
        self._stopping = threading.Event()

    def __call__(self, launch: Launch) -> LaunchResult:
        """Submit a trial, or take up the one that lies in its folder, and await it.

        Raises:
            SchedulerError: Slurm refuses the job, stays away, or lets it wait too long.
            EnvironmentMissingError: Slurm is not installed here.
        """
        folder = launch.folder.resolve()
        has_ended = False
        try:
            ticket = _ticket(folder) or self._prepared(launch, folder)
            if ticket.job is None:
                ticket = self._submitted(ticket, folder)
            result = self._awaited(launch, folder, ticket=ticket, job=ticket.job or "")
            has_ended = True
        finally:
            if not has_ended:
                self.forget(folder)
        return result

    def holds(self, folder: Path) -> bool:
        """Whether the trial in a folder runs, waits or has left a result that counts.

        Raises:
            SchedulerError: no controller answers.
        """
        ticket = _ticket(folder)
        if ticket is None or (folder / WITHDRAWN_NAME).exists():
            return False
        if _report(folder) is not None:
            return True
        # Of a job without a result, the name is asked for where its id was not written any more.
        job = ticket.job or self._asked(lambda: queue.job_named(ticket.name))
        if job is None:
            return False
        if ticket.job is None:
            _write_ticket(folder, ticket.model_copy(update={"job": job}))
        state = self._asked(lambda: queue.state_of(job, name=ticket.name))
        if state is not None and (state.is_alive or state.state in LOST_NODE):
            return state.is_alive
        # A trial that failed by itself would fail again.
        return _exit_code(folder) not in (None, 0, ABANDONED_EXIT, LOST_NODE_EXIT)

    def forget(self, folder: Path) -> None:
        """Cancel the job in a folder, and wait a while for its end."""
        ticket = _ticket(folder)
        if ticket is None:
            return
        (folder / WITHDRAWN_NAME).touch()
        until_s = time.monotonic() + self._pace.settle_s
        job = ticket.job
        while time.monotonic() < until_s:
            try:
                job = job or queue.job_named(ticket.name)
                state = queue.state_of(job, name=ticket.name) if job else None
                if job is None or state is None or not state.is_alive:
                    return
                queue.cancel(job, name=ticket.name)
            except SlurmAwayError:
                pass
            time.sleep(min(1.0, self._pace.poll_s))
        self._told(
            f"job {job or ticket.name} is still there: it ends itself"
            f" {format_s(self._pace.lease_s)} after it has started, or scancel it"
        )

    def stop(self) -> None:
        """Cancel every job under way; their calls raise."""
        self._stopping.set()

    def _prepared(self, launch: Launch, folder: Path) -> Ticket:
        """Write everything that the job needs, and its name."""
        ticket = Ticket(name=f"moetune-{secrets.token_hex(8)}")
        shape = launch_shape(launch.plan, launch.decision)
        job = job_script(
            name=ticket.name,
            folder=folder,
            shape=shape,
            options=self._options,
            limit_s=launch.deadline_s,
            requeue=self._requeue,
        )
        node = node_script(shape=shape, deadline_s=launch.deadline_s, lease_s=self._pace.lease_s)
        config = launch.step_config().model_dump_json(indent=1)
        write_files(folder, {CONFIG_NAME: config, NODE_NAME: node, JOB_NAME: job})
        _write_ticket(folder, ticket)
        return ticket

    def _submitted(self, ticket: Ticket, folder: Path) -> Ticket:
        """Submit until Slurm has answered; what it took without answering is found by its name."""
        _renew(folder)

        def asked() -> str:
            # Not before the first time, but an answer may have been lost since.
            return queue.job_named(ticket.name) or queue.submit(
                folder / JOB_NAME, output=folder / LOG_NAME, environment=self._environment
            )

        job = self._asked(asked)
        named = ticket.model_copy(update={"job": job})
        _write_ticket(folder, named)
        self._told(f"job {job} submitted")
        return named

    def _awaited(self, launch: Launch, folder: Path, *, ticket: Ticket, job: str) -> LaunchResult:
        began_s = time.monotonic()
        waited_s, asked_s, lost_s, said, released = 0.0, began_s, began_s, "", 0
        while True:
            _renew(folder)
            report = _report(folder)
            if report is not None:
                wall_s = time.monotonic() - began_s
                return LaunchResult(status="ok", reason="", report=report, wall_s=wall_s)
            state = self._asked(lambda: _state(ticket, folder, job=job), meanwhile=folder)
            if state is None and _report(folder) is not None:
                continue
            now_s = time.monotonic()
            if state is not None and state.state in WAITING:
                waited_s += now_s - asked_s
                self._check_wait(job, state, waited_s=waited_s)
                if state.reason == queue.HELD_AFTER_LAUNCH and released < MOST_RESTARTS:
                    self._asked(lambda: queue.release(job), meanwhile=folder)
                    released += 1
            asked_s = now_s
            line = _line(job, state)
            if line != said:
                self._told(line)
                said = line
            if state is not None and state.is_alive:
                lost_s = now_s
                overrun = _overrun(state, launch, wall_s=now_s - began_s)
                if overrun is not None:
                    self.forget(folder)
                    return overrun
            elif now_s - lost_s >= self._grace_s(state, folder):
                return _ended(state, folder, launch, wall_s=now_s - began_s)
            self._pause()

    def _grace_s(self, state: JobState | None, folder: Path) -> float:
        """How long an end is doubted: files may lag behind, and a lost job may be queued again."""
        if state is None or (state.state in LOST_NODE and self._requeue):
            return self._pace.settle_s
        if state.state == "COMPLETED" or _exit_code(folder) is None:
            return min(self._pace.settle_s, 5 * self._pace.poll_s)
        return 0.0

    def _check_wait(self, job: str, state: JobState, *, waited_s: float) -> None:
        if waited_s > self._pace.queue_s:
            raise SchedulerError(
                f"job {job} has waited {format_s(waited_s)} for its nodes ({state.reason}); allow"
                " more with --slurm-wait, or ask for other nodes with --slurm; then --resume"
            )

    def _asked(self, question: Callable[[], Answer], *, meanwhile: Path | None = None) -> Answer:
        """Ask until there is an answer, as long as patience lasts."""
        until_s = time.monotonic() + self._pace.patience_s
        is_told = False
        while True:
            try:
                return question()
            except SlurmAwayError as away:
                if time.monotonic() > until_s:
                    raise SchedulerError(
                        f"Slurm did not answer for {format_s(self._pace.patience_s)} ({away});"
                        " go on with --resume when it does"
                    ) from away
                if not is_told:
                    self._told(f"Slurm does not answer ({away}); asking again")
                    is_told = True
            if meanwhile is not None:
                _renew(meanwhile)
            self._pause()

    def _pause(self) -> None:
        if self._stopping.wait(self._pace.poll_s):
            raise SchedulerError("the trial was cancelled because another one could not go on")


def _state(ticket: Ticket, folder: Path, *, job: str) -> JobState | None:
    """Ask for the state of a job, unless its report has come while nobody answers.

    Raises:
        SlurmAwayError: nobody answers, and there is no report.
    """
    try:
        return queue.state_of(job, name=ticket.name)
    except SlurmAwayError:
        if _report(folder) is None:
            raise
        return None


def _overrun(state: JobState, launch: Launch, *, wall_s: float) -> LaunchResult | None:
    """Say what a job that is alive has had too much of; None while it may go on."""
    if state.restarts > MOST_RESTARTS:
        return _crash(f"{state.restarts} of its nodes failed", wall_s=wall_s)
    if state.state not in WAITING and state.run_s > launch.deadline_s:
        return timed_out(launch.deadline_s, wall_s=state.run_s)
    return None


def _ended(state: JobState | None, folder: Path, launch: Launch, *, wall_s: float) -> LaunchResult:
    """Judge a job that is over and has left no report that could be read."""
    code, tail = _exit_code(folder), log_tail(folder / LOG_NAME)
    if state is not None and state.state == "OUT_OF_MEMORY":
        reason = "Slurm ended the job for lack of memory"
        return LaunchResult(status="out_of_memory", reason=reason, report=None, wall_s=wall_s)
    if state is not None and state.state in ("TIMEOUT", "DEADLINE"):
        return timed_out(launch.deadline_s, wall_s=wall_s)
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


def _crash(reason: str, *, wall_s: float) -> LaunchResult:
    return LaunchResult(status="crashed", reason=reason, report=None, wall_s=wall_s)


def _line(job: str, state: JobState | None) -> str:
    if state is None:
        return f"job {job} is not known to Slurm"
    if state.state in WAITING:
        return f"job {job} waits: {state.reason or state.state}"
    return f"job {job}: {state.state}"


def _report(folder: Path) -> StepReport | None:
    """The report of a run that ended well."""
    if _exit_code(folder) != 0:
        return None
    try:
        return StepReport.model_validate_json((folder / REPORT_NAME).read_bytes())
    except (OSError, ValidationError):
        return None


def _exit_code(folder: Path) -> int | None:
    try:
        return int((folder / EXIT_NAME).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _renew(folder: Path) -> None:
    """Change the lease; nodes look whether it is another than before."""
    with contextlib.suppress(OSError):  # A disk that is full for a moment must not end a trial.
        partial = folder / f".{LEASE_NAME}.partial"
        partial.write_text(f"{time.time_ns()}\n", encoding="ascii")
        partial.replace(folder / LEASE_NAME)


def _ticket(folder: Path) -> Ticket | None:
    try:
        return Ticket.model_validate_json((folder / TICKET_NAME).read_bytes())
    except (OSError, ValidationError):
        return None


def _write_ticket(folder: Path, ticket: Ticket) -> None:
    write_files(folder, {TICKET_NAME: ticket.model_dump_json() + "\n"})
