"""Runs one deployment: files, server, benchmark runs; no process is left behind.

    1  write the emitted files of the decision into the trial's folder
    2  start the user's command; wait until every health endpoint and a first request succeed, for
       at most `start_s`
    3  run the client `runs` times, each with a different seed, and read its results
    4  end the server and all of its processes

Placeholders of both templates, filled in argument by argument as tuner/verify/command.py does:

    launch     folder with the emitted files that start the deployment
    model      the environment's MODEL
    devices    that the decision needs
    folder     of this trial, in the client's command of this run

and of the client's command only:

    result          the file where the client should leave its JSON
    url             address of the deployment, also in the environment as BASE_URL
    requests, warmups, seed
    concurrency, rate, input_tokens, output_tokens      of the plan's traffic, means of lengths

Failed requests do not fail the trial; they are counted. A server that ends during a run, or a
client that fails, does. Not covered: parallel deployments; ports and devices are the user's.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tuner.config.serve import ServeDecision
from tuner.engines.metrics.benchmark_run import BenchmarkRun
from tuner.errors import EnvironmentMissingError, SpecError
from tuner.plans.serve import ServePlan, ServePrediction
from tuner.units import format_s
from tuner.verify.command import Template, fill_template
from tuner.verify.deployments.clients import RESULT_NAME, Client
from tuner.verify.deployments.records import ServeTrialRecord
from tuner.verify.deployments.server import (
    Server,
    await_free,
    await_ready,
    serving,
)
from tuner.verify.launcher import LOG_NAME, failure_result, log_tail, printable, run_command
from tuner.verify.records import Origin, TrialStatus

SERVER_PLACEHOLDERS: Final = ("launch", "folder", "model", "devices")
CLIENT_PLACEHOLDERS: Final = (
    *SERVER_PLACEHOLDERS,
    "result",
    "url",
    "requests",
    "warmups",
    "seed",
    "concurrency",
    "rate",
    "input_tokens",
    "output_tokens",
)

LAST_LINES: Final = 20
"""Lines of a log that the record of a failed trial keeps."""
LINE_LETTERS: Final = 300

NOT_FOUND: Final = frozenset({126, 127})
"""Shell exit codes for a missing or non-executable program (POSIX.1-2017, XCU 2.8.2)."""

PORT_FREE_S: Final = 30.0
"""Seconds that the previous deployment's ports may stay in use."""

RUN_SLOWER_THAN_PREDICTED: Final = 10.0
RUN_START_S: Final = 600.0
"""Clients first load a tokenizer and generate prompts, which can take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentLaunch:
    """One deployment to start."""

    number: int
    plan: ServePlan
    decision: ServeDecision
    predicted: ServePrediction
    folder: Path
    """Folder of this trial only."""
    url: str
    addresses: tuple[str, ...]
    """Health endpoints."""
    values: Mapping[str, str]
    """Placeholders that do not depend on the run; those without a value are absent."""
    run_s: float
    """Predicted duration of a benchmark run."""


class LaunchFailedError(Exception):
    """A deployment or its client failed, which ends a trial."""

    def __init__(self, *, status: TrialStatus, reason: str, tail: str = "") -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.tail = tail


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentStarter:
    """Starts deployments by the user's command."""

    command: Template
    start_s: float
    """Timeout until a deployment is ready, in seconds."""
    watch_s: float = 1.0
    """Polling interval, in seconds."""
    environment: Mapping[str, str]
    prepare: Callable[[DeploymentLaunch], None]
    """Writes the emitted files of a trial into `launch/` of its folder."""
    on_message: Callable[[str], None]
    """Gets progress messages."""

    @contextmanager
    def started(self, launch: DeploymentLaunch) -> Iterator[Server]:
        """Start a deployment and wait until it is ready; end it when this is left.

        Raises:
            LaunchFailedError: it did not get ready.
            SpecError: the template needs a value that the plan or the environment does not have.
            EnvironmentMissingError: a program does not exist, or the port is taken.
        """
        start_s = time.monotonic()
        launch.folder.mkdir(parents=True, exist_ok=True)
        self.prepare(launch)
        command = fill_template(
            self.command, self._values(launch, self.command, option="--command")
        )
        await_free(launch.addresses, limit_s=PORT_FREE_S, watch_s=self.watch_s)
        with serving(
            command, folder=launch.folder / "server", environment=self.environment_of(launch)
        ) as server:
            self._await(server, launch)
            self.on_message(f"ready after {format_s(time.monotonic() - start_s)}")
            yield server

    def environment_of(self, launch: DeploymentLaunch) -> dict[str, str]:
        """Return the environment of a deployment's command and client."""
        return {**self.environment, "BASE_URL": launch.url}

    def _await(self, server: Server, launch: DeploymentLaunch) -> None:
        message = await_ready(
            server,
            launch.addresses,
            launch.url,
            model=self.environment.get("MODEL", ""),
            key=self.environment.get("OPENAI_API_KEY", ""),
            limit_s=self.start_s,
            watch_s=self.watch_s,
        )
        if not message:
            return
        code, tail = server.process.poll(), server.tail()
        if code is None:
            raise LaunchFailedError(status="timeout", reason=message, tail=tail)
        if code in NOT_FOUND:
            raise EnvironmentMissingError(f"--command: {_last_line(tail) or message}")
        raise _failed(code, message=message, tail=tail)

    def _values(
        self, launch: DeploymentLaunch, template: Template, *, option: str, run: int | None = None
    ) -> dict[str, tuple[str, ...]]:
        """Return the values of a template's placeholders, of a run of the client or of none."""
        folder = launch.folder if run is None else launch.folder / f"run-{run}"
        own = {
            "folder": str(folder.resolve()),
            "result": str((folder / RESULT_NAME).resolve()),
            "url": launch.url,
            **({"model": self.environment["MODEL"]} if self.environment.get("MODEL") else {}),
        }
        values = {**launch.values, **own}
        for name in sorted(template.names - values.keys() - {"seed"}):
            raise SpecError(f"{option}: {{{name}}}: {_LACKS[name]}")
        return {name: (value,) for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentLauncher(DeploymentStarter):
    """Starts deployments and measures them by a benchmark client."""

    benchmark: Template
    client: Client
    runs: int

    def __call__(self, launch: DeploymentLaunch, *, origin: Origin) -> ServeTrialRecord:
        """Run one trial to its record.

        Raises:
            SpecError: a template needs a value that the plan or the environment does not have.
            EnvironmentMissingError: a program does not exist, or the port is taken.
        """
        start_s = time.monotonic()
        runs: list[BenchmarkRun] = []
        status: TrialStatus = "ok"
        ready_s, reason, tail = None, "", ""
        try:
            with self.started(launch) as server:
                ready_s = time.monotonic() - start_s
                for run in range(self.runs):
                    runs.append(self._run(server, launch, run=run))
                    self.on_message(_run_line(run + 1, self.runs, runs[-1]))
        except LaunchFailedError as failed:
            status, reason, tail = failed.status, failed.reason, failed.tail
        return ServeTrialRecord(
            number=launch.number,
            origin=origin,
            decision=launch.decision,
            status=status,
            reason=reason,
            last_lines=_last_lines(tail),
            predicted=launch.predicted,
            runs=tuple(runs),
            ready_s=ready_s,
            wall_s=time.monotonic() - start_s,
            engine=launch.plan.goal.engine_on(launch.decision.instances[0].pool).name,
            client=self.client.name,
        )

    def _run(self, server: Server, launch: DeploymentLaunch, *, run: int) -> BenchmarkRun:
        folder = launch.folder / f"run-{run}"
        folder.mkdir(parents=True, exist_ok=True)
        # Every run of a study sends different prompts.
        values = {
            **self._values(launch, self.benchmark, option="--bench", run=run),
            "seed": (str(1 + launch.number * self.runs + run),),
        }
        command = fill_template(self.benchmark, values)
        limit_s = RUN_START_S + RUN_SLOWER_THAN_PREDICTED * launch.run_s
        ran = run_command(
            command,
            folder=folder,
            deadline_s=limit_s,
            environment=self.environment_of(launch),
            watch=server.ended,
            option="--bench",
        )
        tail = log_tail(folder / LOG_NAME)
        code = server.process.poll()
        if ran.stopped or code is not None:
            message = f"{server.ended()} under run {run + 1} of the client"
            raise _failed(code or 0, message=message, tail=server.tail())
        if ran.exit_code is None:
            reason = f"run {run + 1} of the client took longer than {limit_s:.0f} s"
            raise LaunchFailedError(status="timeout", reason=reason, tail=tail)
        if ran.exit_code in NOT_FOUND:
            raise EnvironmentMissingError(f"--bench: {_last_line(tail)}")
        if ran.exit_code:
            message = f"run {run + 1} of the client ended with exit code {ran.exit_code}"
            raise LaunchFailedError(
                status="crashed", reason=_with(message, _last_line(tail)), tail=tail
            )
        try:
            measured = self.client.result(folder)
        except ValueError as error:
            reason = f"run {run + 1}: {error}"
            raise LaunchFailedError(status="crashed", reason=reason, tail=tail) from error
        return _counted(measured, values if "requests" in self.benchmark.names else {})


_LACKS: Final = {
    "model": "the environment has no MODEL; set it to the path or name of the weights",
    "concurrency": "the plan's traffic is an open loop; use {rate}",
    "input_tokens": "the plan's traffic is a trace, which has its own lengths",
    "output_tokens": "the plan's traffic is a trace, which has its own lengths",
}
"""Placeholders that may have no value, and why."""


def _failed(code: int, *, message: str, tail: str) -> LaunchFailedError:
    """Classify a server that ended like a launch, with its last message."""
    result = failure_result(code, tail=tail, wall_s=0.0)
    cause = result.reason if not result.reason.startswith("exit code") else _last_line(tail)
    return LaunchFailedError(status=result.status, reason=_with(message, cause), tail=tail)


def _with(message: str, line: str) -> str:
    return f"{message}: {line}" if line else message


def _counted(run: BenchmarkRun, values: Mapping[str, tuple[str, ...]]) -> BenchmarkRun:
    """Derive failed requests from those to send, if the client does not report failures."""
    if run.failed is not None or not values:
        return run
    sent = int(values["requests"][0])
    return run.model_copy(update={"failed": max(0, sent - run.completed)})


def _last_line(tail: str) -> str:
    return next(iter(_last_lines(tail)[-1:]), "")


def _last_lines(tail: str) -> tuple[str, ...]:
    lines = [printable(line)[:LINE_LETTERS] for line in tail.splitlines() if line.strip()]
    return tuple(lines[-LAST_LINES:])


def _run_line(run: int, runs: int, result: BenchmarkRun) -> str:
    failed = f", {result.failed} failed" if result.failed else ""
    return (
        f"run {run} of {runs}: TTFT {format_s(result.ttft_s.mean)}, TPOT"
        f" {format_s(result.tpot_s.mean)}, {result.requests_per_s:.4g} requests/s{failed}"
    )
