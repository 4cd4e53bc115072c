"""Runs the reference step of each trial as a job of Slurm, and sees to its end.

The trial's folder lies on a file system that all nodes share. Its `ticket.json` names the job
before anybody waits for it: first the name, then, once sbatch has answered, the id. So whoever
resumes after a kill finds the job by its id or, had the kill come between the two, by its name.

    submitted -> waits in the queue (bounded) -> runs (bounded by its deadline) -> report or failure
       ^                ^                            |
       |                +---- a node failed or the job was preempted: Slurm queues it again
       +---- the job is gone without a result (a controller that was killed forgets what it had not
             written yet; one that is away queues nothing again), both at most MOST_RESTARTS times

A job that is submitted anew gets a name of its own. What may be left of the former one is ended by
the nodes themselves, whose `run` is another now, and can leave neither report nor exit code.

While a trial is awaited its `lease` is renewed; a job whose lease stays the same ends itself. When
this process is told to end, jobs are cancelled first. A controller that is away is asked again for
`patience_s`; a report that lies there with exit code 0 needs no controller.

Not covered: clusters whose nodes do not share the plan's folder; arrays (every trial has a shape of
its own); federations of several clusters.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

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
)
from tuner.verify.progress import PROGRESS_NAME
from tuner.verify.slurm import queue
from tuner.verify.slurm.folder import (
    WITHDRAWN_NAME,
    Ticket,
    exit_code,
    renew_lease,
    report_of,
    ticket_of,
    write_ticket,
)
from tuner.verify.slurm.options import Options, heeding
from tuner.verify.slurm.outcome import Lost, ended_as, lost_of, overrun_of
from tuner.verify.slurm.queue import LOST_NODE, WAITING, JobState, SlurmAwayError
from tuner.verify.slurm.script import (
    ABANDONED_EXIT,
    EXIT_NAME,
    JOB_NAME,
    LOST_NODE_EXIT,
    MOST_RESTARTS,
    NODE_NAME,
    RUN_NAME,
    job_script,
    node_script,
)

Answer = TypeVar("Answer")


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
        self._environment = heeding(options, environment)
        self._told = told
        self._stopping = threading.Event()

    def __call__(self, launch: Launch) -> LaunchResult:
        """Submit a trial, or take up the one that lies in its folder, and await it.

        Raises:
            SchedulerError: Slurm refuses the job, stays away, or lets it wait too long.
            EnvironmentMissingError: Slurm is not installed here.
        """
        folder, began_s = launch.folder.resolve(), time.monotonic()
        has_ended = False
        try:
            ticket = ticket_of(folder) or self._prepared(launch, folder, losses=0)
            while True:
                if ticket.job is None:
                    ticket = self._submitted(ticket, folder)
                ended = self._awaited(launch, folder, ticket=ticket, began_s=began_s)
                if isinstance(ended, LaunchResult):
                    has_ended = True
                    return ended
                ticket = self._begun_anew(launch, folder, lost=ticket, restarts=ended.restarts)
        finally:
            if not has_ended:
                self.forget(folder)

    def holds(self, folder: Path) -> bool:
        """Whether the trial in a folder runs, waits or has left a result that counts.

        Raises:
            SchedulerError: no controller answers.
        """
        ticket = ticket_of(folder)
        if ticket is None or (folder / WITHDRAWN_NAME).exists():
            return False
        if report_of(folder) is not None:
            return True
        # Of a job without a result, the name is asked for where its id was not written any more.
        job = ticket.job or self._asked(lambda: queue.job_named(ticket.name))
        if job is None:
            return False
        if ticket.job is None:
            write_ticket(folder, ticket.model_copy(update={"job": job}))
        state = self._asked(lambda: queue.state_of(job, name=ticket.name))
        if state is not None and (state.is_alive or state.state in LOST_NODE):
            return state.is_alive
        # A trial that failed by itself would fail again.
        return exit_code(folder) not in (None, 0, ABANDONED_EXIT, LOST_NODE_EXIT)

    def forget(self, folder: Path) -> None:
        """Cancel the job in a folder, and wait a while for its end."""
        ticket = ticket_of(folder)
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

    def _begun_anew(self, launch: Launch, folder: Path, *, lost: Ticket, restarts: int) -> Ticket:
        """Leave nothing of a job that was lost, and prepare another one."""
        self._told(f"job {lost.job} was lost without a result; the trial is submitted anew")
        # First of all the nodes: what still runs there ends itself when its `run` is gone.
        (folder / RUN_NAME).unlink(missing_ok=True)
        if report_of(folder) is not None:
            return lost  # It came at the last moment.
        for name in (EXIT_NAME, REPORT_NAME, PROGRESS_NAME):
            (folder / name).unlink(missing_ok=True)
        self._asked(lambda: queue.cancel(lost.job or "", name=lost.name), meanwhile=folder)
        return self._prepared(launch, folder, losses=lost.losses + restarts + 1)

    def _prepared(self, launch: Launch, folder: Path, *, losses: int) -> Ticket:
        """Write everything that the job needs, and its name."""
        ticket = Ticket(name=f"moetune-{secrets.token_hex(8)}", losses=losses)
        shape = launch_shape(launch.plan, launch.decision)
        job = job_script(
            name=ticket.name,
            folder=folder,
            shape=shape,
            options=self._options,
            limit_s=launch.deadline_s,
            restarts=MOST_RESTARTS - losses if self._requeue else 0,
        )
        node = node_script(shape=shape, deadline_s=launch.deadline_s, lease_s=self._pace.lease_s)
        config = launch.step_config().model_dump_json(indent=1)
        write_files(folder, {CONFIG_NAME: config, NODE_NAME: node, JOB_NAME: job})
        write_ticket(folder, ticket)
        return ticket

    def _submitted(self, ticket: Ticket, folder: Path) -> Ticket:
        """Submit until Slurm has answered; what it took without answering is found by its name."""
        renew_lease(folder)

        def asked() -> str:
            # Not before the first time, but an answer may have been lost since.
            return queue.job_named(ticket.name) or queue.submit(
                folder / JOB_NAME, output=folder / LOG_NAME, environment=self._environment
            )

        job = self._asked(asked)
        named = ticket.model_copy(update={"job": job})
        write_ticket(folder, named)
        self._told(f"job {job} submitted")
        return named

    def _awaited(
        self, launch: Launch, folder: Path, *, ticket: Ticket, began_s: float
    ) -> LaunchResult | Lost:
        job, here_s = ticket.job or "", time.monotonic()
        waited_s, asked_s, lost_s, said, released = 0.0, here_s, here_s, "", 0
        while True:
            renew_lease(folder)
            report = report_of(folder)
            if report is not None:
                wall_s = time.monotonic() - began_s
                return LaunchResult(status="ok", reason="", report=report, wall_s=wall_s)
            state = self._asked(lambda: _state(ticket, folder, job=job), meanwhile=folder)
            if state is None and report_of(folder) is not None:
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
                overrun = overrun_of(state, launch, folder, ticket=ticket, wall_s=now_s - began_s)
                if overrun is not None:
                    self.forget(folder)
                    return overrun
            elif now_s - lost_s >= self._grace_s(state, folder):
                return self._over(state, folder, ticket=ticket, wall_s=now_s - began_s)
            self._pause()

    def _over(
        self, state: JobState | None, folder: Path, *, ticket: Ticket, wall_s: float
    ) -> LaunchResult | Lost:
        lost = lost_of(state, folder)
        if lost is not None and self._requeue and ticket.losses < MOST_RESTARTS:
            return lost
        return ended_as(state, folder, wall_s=wall_s)

    def _grace_s(self, state: JobState | None, folder: Path) -> float:
        """How long an end is doubted: files may lag behind, and a lost job may be queued again."""
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
                renew_lease(meanwhile)
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
        if report_of(folder) is None:
            raise
        return None


def _line(job: str, state: JobState | None) -> str:
    if state is None:
        return f"job {job} is not known to Slurm"
    if state.state in WAITING:
        return f"job {job} waits: {state.reason or state.state}"
    return f"job {job}: {state.state}"
