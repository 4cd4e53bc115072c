"""Runs the reference step of each trial as a Slurm job, until its end.

The trial's folder is on a file system that all nodes share. Its `ticket.json` identifies the job
before anybody waits for it: first the name, then, once sbatch has replied, the id. A verification
that resumes after a kill finds the job by its id or, if the kill came between the two, by its name.

    submitted -> waits in the queue (bounded) -> runs (bounded by its deadline) -> report or failure
                        ^                            |
                        +---- a node failed or the job was preempted: Slurm queues it again, at most
                              MOST_RESTARTS times

A job that is gone without a result (a controller that was killed forgets what it had not written
yet) is a failed trial. Leftovers of a former run are ended by the nodes themselves, whose `run`
differs then, and can write neither report nor exit code.

While a trial is awaited its `lease` is renewed; a job whose lease stops changing ends itself. When
this process is terminated, jobs are cancelled first. An unreachable controller is retried for
`patience_s`; a report with exit code 0 needs no controller.

Not covered: clusters whose nodes do not share the plan's folder; job arrays (trials differ in
shape); federations of several clusters.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tuner.engines.launchers.shape import launch_shape
from tuner.errors import SchedulerError
from tuner.output import write_files
from tuner.units import format_s
from tuner.verify.launcher import (
    CONFIG_NAME,
    LOG_NAME,
    Launch,
    LaunchResult,
)
from tuner.verify.slurm import queue
from tuner.verify.slurm.options import Options, without_overrides
from tuner.verify.slurm.outcome import (
    WITHDRAWN_NAME,
    Ticket,
    check_overrun,
    exit_code,
    job_result,
    read_report,
    read_ticket,
    renew_lease,
    write_ticket,
)
from tuner.verify.slurm.queue import LOST_NODE, WAITING, JobState, SlurmAwayError
from tuner.verify.slurm.script import (
    ABANDONED_EXIT,
    JOB_NAME,
    LOST_NODE_EXIT,
    MOST_RESTARTS,
    NODE_NAME,
    job_script,
    node_script,
)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmTimeouts:
    """Timeouts and polling interval, in seconds."""

    poll_s: float = 2.0
    """Polling interval of a job."""
    lease_s: float = 300.0
    """Seconds that a job runs on once nobody waits for it."""
    patience_s: float = 600.0
    """Seconds of patience with a controller that does not respond."""
    queue_s: float = 24 * 3600.0
    """Seconds that a trial may wait in the queue."""
    settle_s: float = 30.0
    """Seconds for Slurm to requeue the job of a failed node, and for a cancelled job to end."""


class SlurmLauncher:
    """A `DurableLauncher`; a resource with jobs, which `stop` cancels."""

    def __init__(
        self,
        *,
        options: Options = (),
        requeue: bool = True,
        pace: SlurmTimeouts | None = None,
        environment: Mapping[str, str],
        on_message: Callable[[str], None],
    ) -> None:
        """Configure the submission of jobs.

        Args:
            options: the user's sbatch options.
            requeue: whether to requeue a job after a node failure or preemption.
            pace: timeouts and polling interval.
            environment: that sbatch passes to the job.
            on_message: gets a line whenever a job changes its state.
        """
        self._options = options
        self._requeue = requeue
        self._pace = pace or SlurmTimeouts()
        self._environment = without_overrides(options, environment)
        self._on_message = on_message
        self._stopping = threading.Event()

    def __call__(self, launch: Launch) -> LaunchResult:
        """Submit a trial, or adopt the one in its folder, and await it.

        Raises:
            SchedulerError: Slurm refuses the job, does not respond, or lets it wait too long.
            EnvironmentMissingError: Slurm is not installed here.
        """
        folder, began_s = launch.folder.resolve(), time.monotonic()
        has_ended = False
        try:
            ticket = read_ticket(folder) or self._prepared(launch, folder)
            if ticket.job is None:
                ticket = self._submitted(ticket, folder)
            result = self._awaited(launch, folder, ticket=ticket, began_s=began_s)
            has_ended = True
            return result
        finally:
            if not has_ended:
                self.forget(folder)

    def holds(self, folder: Path) -> bool:
        """Return whether the trial in a folder runs, waits or has a valid result.

        Raises:
            SchedulerError: no controller responds.
        """
        ticket = read_ticket(folder)
        if ticket is None or (folder / WITHDRAWN_NAME).exists():
            return False
        if read_report(folder) is not None:
            return True
        # Without a result, look the job up by name if its id was not written.
        job = ticket.job or self._retry(lambda: queue.find_job(ticket.name))
        if job is None:
            return False
        if ticket.job is None:
            write_ticket(folder, ticket.model_copy(update={"job": job}))
        state = self._retry(lambda: queue.job_state(job, name=ticket.name))
        if state is not None and (state.is_alive or state.state in LOST_NODE):
            return state.is_alive
        # The trial's own failure is a result: it would fail again.
        return exit_code(folder) not in (None, 0, ABANDONED_EXIT, LOST_NODE_EXIT)

    def forget(self, folder: Path) -> None:
        """Cancel the job in a folder, and wait briefly for its end."""
        ticket = read_ticket(folder)
        if ticket is None:
            return
        (folder / WITHDRAWN_NAME).touch()
        until_s = time.monotonic() + self._pace.settle_s
        job = ticket.job
        while time.monotonic() < until_s:
            try:
                job = job or queue.find_job(ticket.name)
                state = queue.job_state(job, name=ticket.name) if job else None
                if job is None or state is None or not state.is_alive:
                    return
                queue.cancel(job, name=ticket.name)
            except SlurmAwayError:
                pass
            time.sleep(min(1.0, self._pace.poll_s))
        self._on_message(
            f"job {job or ticket.name} is still there: it ends itself"
            f" {format_s(self._pace.lease_s)} after it has started, or scancel it"
        )

    def stop(self) -> None:
        """Cancel every running job; their calls raise."""
        self._stopping.set()

    def _prepared(self, launch: Launch, folder: Path) -> Ticket:
        """Write the files of the job, and its ticket."""
        ticket = Ticket(name=f"moetune-{secrets.token_hex(8)}")
        shape = launch_shape(launch.plan, launch.decision)
        job = job_script(
            name=ticket.name,
            folder=folder,
            shape=shape,
            options=self._options,
            limit_s=launch.deadline_s,
            restarts=MOST_RESTARTS if self._requeue else 0,
        )
        node = node_script(shape=shape, deadline_s=launch.deadline_s, lease_s=self._pace.lease_s)
        config = launch.step_config().model_dump_json(indent=1)
        write_files(folder, {CONFIG_NAME: config, NODE_NAME: node, JOB_NAME: job})
        write_ticket(folder, ticket)
        return ticket

    def _submitted(self, ticket: Ticket, folder: Path) -> Ticket:
        """Submit until Slurm replies; a job accepted without a reply is found by its name."""
        renew_lease(folder)

        def submit_once() -> str:
            # After the first attempt, the reply may have been lost.
            return queue.find_job(ticket.name) or queue.submit(
                folder / JOB_NAME, output=folder / LOG_NAME, environment=self._environment
            )

        job = self._retry(submit_once)
        named = ticket.model_copy(update={"job": job})
        write_ticket(folder, named)
        self._on_message(f"job {job} submitted")
        return named

    def _awaited(
        self, launch: Launch, folder: Path, *, ticket: Ticket, began_s: float
    ) -> LaunchResult:
        job, here_s = ticket.job or "", time.monotonic()
        waited_s, polled_s, lost_s, message = 0.0, here_s, here_s, ""
        while True:
            renew_lease(folder)
            report = read_report(folder)
            if report is not None:
                wall_s = time.monotonic() - began_s
                return LaunchResult(status="ok", reason="", report=report, wall_s=wall_s)
            state = self._retry(lambda: _state(ticket, folder, job=job), meanwhile=folder)
            if state is None and read_report(folder) is not None:
                continue
            now_s = time.monotonic()
            if state is not None and state.state in WAITING:
                waited_s += now_s - polled_s
                self._check_wait(job, state, waited_s=waited_s)
            polled_s = now_s
            line = _line(job, state)
            if line != message:
                self._on_message(line)
                message = line
            if state is not None and state.is_alive:
                lost_s = now_s
                overrun = check_overrun(state, launch, folder, wall_s=now_s - began_s)
                if overrun is not None:
                    self.forget(folder)
                    return overrun
            elif now_s - lost_s >= self._grace_s(state, folder):
                return job_result(state, folder, wall_s=now_s - began_s)
            self._pause()

    def _grace_s(self, state: JobState | None, folder: Path) -> float:
        """Grace period before an end is final: files may lag, and Slurm may requeue a lost job."""
        if state is None or (state.state in LOST_NODE and self._requeue):
            return self._pace.settle_s
        if state.state == "COMPLETED" or exit_code(folder) is None:
            return min(self._pace.settle_s, 5 * self._pace.poll_s)
        return 0.0

    def _check_wait(self, job: str, state: JobState, *, waited_s: float) -> None:
        if waited_s > self._pace.queue_s:
            raise SchedulerError(
                f"job {job} has waited {format_s(waited_s)} for its nodes ({state.reason}); allow"
                " more with --slurm-wait, or ask for other nodes with --slurm; then --resume"
            )

    def _retry(self, request: Callable[[], Result], *, meanwhile: Path | None = None) -> Result:
        """Repeat a request until Slurm replies, for at most `patience_s`."""
        until_s = time.monotonic() + self._pace.patience_s
        has_reported = False
        while True:
            try:
                return request()
            except SlurmAwayError as away:
                if time.monotonic() > until_s:
                    raise SchedulerError(
                        f"Slurm did not respond for {format_s(self._pace.patience_s)} ({away});"
                        " resume with --resume when it does"
                    ) from away
                if not has_reported:
                    self._on_message(f"Slurm does not respond ({away}); retrying")
                    has_reported = True
            if meanwhile is not None:
                renew_lease(meanwhile)
            self._pause()

    def _pause(self) -> None:
        if self._stopping.wait(self._pace.poll_s):
            raise SchedulerError("the trial was cancelled because another one could not go on")


def _state(ticket: Ticket, folder: Path, *, job: str) -> JobState | None:
    """Return the state of a job; None if Slurm does not respond but its report is there.

    Raises:
        SlurmAwayError: Slurm does not respond, and there is no report.
    """
    try:
        return queue.job_state(job, name=ticket.name)
    except SlurmAwayError:
        if read_report(folder) is None:
            raise
        return None


def _line(job: str, state: JobState | None) -> str:
    if state is None:
        return f"job {job} is not known to Slurm"
    if state.state in WAITING:
        return f"job {job} waits: {state.reason or state.state}"
    return f"job {job}: {state.state}"
