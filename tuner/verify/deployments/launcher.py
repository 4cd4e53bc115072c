"""One deployment from its start to its end: files, server, runs of the client, nothing left.

    1  write the emitted files of the decision into the trial's folder
    2  start the user's command; wait until every address and a first request is answered, for at
       most `start_s`
    3  run the client `runs` times, each with a seed of its own, and read what it tells
    4  end the server and all it started

Placeholders of both templates, filled in argument by argument as tuner/verify/command.py does:

    launch     folder with the emitted files that start the deployment
    model      the environment's MODEL
    devices    that the decision asks for
    folder     of this trial, in the client's command of this run

and of the client's command alone:

    result          the file where the client should leave its JSON
    url             address of the deployment, also in the environment as BASE_URL
    requests, warmups, seed
    concurrency, rate, input_tokens, output_tokens      of the plan's traffic, means of lengths

Requests that fail do not fail the trial; they are counted. A server that ends under the client, or
a client that fails, does. Not covered: two deployments at a time; ports and devices are the user's.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tuner.errors import EnvironmentMissingError, SpecError
from tuner.serve_plan import ServeDecision, ServePlan, ServePrediction
from tuner.units import format_s
from tuner.verify.command import Template, filled
from tuner.verify.deployments.clients import RESULT_NAME, Client
from tuner.verify.deployments.records import BenchRun
from tuner.verify.deployments.server import (
    ANSWER_S,
    Server,
    await_answers,
    await_free,
    await_request,
    serving,
)
from tuner.verify.launcher import LOG_NAME, failure, log_tail, run_command
from tuner.verify.records import TrialStatus

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
"""Of a log, kept in the record of a trial that failed."""
LINE_LETTERS: Final = 300

NOT_FOUND: Final = frozenset({126, 127})
"""How shells say that a program does not exist or may not be executed (POSIX.1-2017, XCU 2.8.2)."""

PORT_FREE_S: Final = 30.0
"""That the former deployment's ports may stay taken."""

RUN_SLOWER_THAN_PREDICTED: Final = 10.0
RUN_START_S: Final = 600.0
"""Clients load a tokenizer and make up their prompts first, which can take minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long things may take, in seconds."""

    start_s: float
    """Until a deployment answers."""
    watch_s: float = 1.0
    """Between two looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentLaunch:
    """One deployment to start."""

    number: int
    plan: ServePlan
    decision: ServeDecision
    predicted: ServePrediction
    folder: Path
    """Of this trial alone."""
    url: str
    addresses: tuple[str, ...]
    """That answer once it is ready."""
    values: Mapping[str, str]
    """Placeholders that do not depend on the run; those that the plan has no value for are not in
    it."""
    run_s: float
    """That a run of the client should take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentResult:
    """How a deployment's trial ended."""

    status: TrialStatus
    reason: str = ""
    last_lines: tuple[str, ...] = ()
    runs: tuple[BenchRun, ...] = ()
    ready_s: float | None = None
    wall_s: float


class _Failed(Exception):  # noqa: N818 - ends a trial, is no error of moetune's
    def __init__(self, *, status: TrialStatus, reason: str, tail: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.tail = tail


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentLauncher:
    """Starts deployments by the user's command and measures them by a client."""

    command: Template
    bench: Template
    client: Client
    runs: int
    pace: Pace
    environment: Mapping[str, str]
    prepare: Callable[[DeploymentLaunch], None]
    """Writes the emitted files of a trial into `launch/` of its folder."""
    told: Callable[[str], None]
    """Hears what happens, a line each."""

    def __call__(self, launch: DeploymentLaunch) -> DeploymentResult:
        """Run one trial.

        Raises:
            SpecError: a template asks for what the plan or the environment does not have.
            EnvironmentMissingError: a program does not exist, or the port is taken.
        """
        start_s = time.monotonic()
        launch.folder.mkdir(parents=True, exist_ok=True)
        self.prepare(launch)
        command = filled(self.command, self._values(launch, self.command, run=0))
        environment = {**self.environment, "BASE_URL": launch.url}
        runs: list[BenchRun] = []
        ready_s = None
        await_free(launch.addresses, limit_s=PORT_FREE_S, watch_s=self.pace.watch_s)
        try:
            with serving(
                command, folder=launch.folder / "server", environment=environment
            ) as server:
                self._await(server, launch)
                ready_s = time.monotonic() - start_s
                self.told(f"answers after {format_s(ready_s)}")
                for run in range(self.runs):
                    runs.append(self._run(server, launch, run=run, environment=environment))
                    self.told(_run_line(run + 1, self.runs, runs[-1]))
        except _Failed as failed:
            return DeploymentResult(
                status=failed.status,
                reason=failed.reason,
                last_lines=_last_lines(failed.tail),
                runs=tuple(runs),
                ready_s=ready_s,
                wall_s=time.monotonic() - start_s,
            )
        return DeploymentResult(
            status="ok", runs=tuple(runs), ready_s=ready_s, wall_s=time.monotonic() - start_s
        )

    def _await(self, server: Server, launch: DeploymentLaunch) -> None:
        start_s, watch_s = time.monotonic(), self.pace.watch_s
        said = await_answers(server, launch.addresses, limit_s=self.pace.start_s, watch_s=watch_s)
        said = said or await_request(
            server,
            launch.url,
            model=self.environment.get("MODEL", ""),
            key=self.environment.get("OPENAI_API_KEY", ""),
            limit_s=max(self.pace.start_s - (time.monotonic() - start_s), ANSWER_S),
            watch_s=watch_s,
        )
        if not said:
            return
        code, tail = server.process.poll(), server.tail()
        if code is None:
            raise _Failed(status="timeout", reason=said, tail=tail)
        if code in NOT_FOUND:
            raise EnvironmentMissingError(f"--command: {_last_line(tail) or said}")
        raise _failed(code, said=said, tail=tail)

    def _run(
        self,
        server: Server,
        launch: DeploymentLaunch,
        *,
        run: int,
        environment: Mapping[str, str],
    ) -> BenchRun:
        folder = launch.folder / f"run-{run}"
        folder.mkdir(parents=True, exist_ok=True)
        values = self._values(launch, self.bench, run=run)
        command = filled(self.bench, values)
        limit_s = RUN_START_S + RUN_SLOWER_THAN_PREDICTED * launch.run_s
        try:
            ran = run_command(
                command,
                folder=folder,
                deadline_s=limit_s,
                environment=environment,
                watch=server.ended,
            )
        except OSError as error:
            raise EnvironmentMissingError(f"--bench: {command[0]}: {error.strerror}") from error
        tail = log_tail(folder / LOG_NAME)
        code = server.process.poll()
        if ran.stopped or code is not None:
            said = f"{server.ended()} under run {run + 1} of the client"
            raise _failed(code or 0, said=said, tail=server.tail())
        if ran.exit_code is None:
            reason = f"run {run + 1} of the client took longer than {limit_s:.0f} s"
            raise _Failed(status="timeout", reason=reason, tail=tail)
        if ran.exit_code in NOT_FOUND:
            raise EnvironmentMissingError(f"--bench: {_last_line(tail)}")
        if ran.exit_code:
            said = f"run {run + 1} of the client ended with exit code {ran.exit_code}"
            raise _Failed(status="crashed", reason=_with(said, _last_line(tail)), tail=tail)
        try:
            found = self.client.result(folder)
        except ValueError as error:
            reason = f"run {run + 1}: {error}"
            raise _Failed(status="crashed", reason=reason, tail=tail) from error
        return _counted(found, values if "requests" in self.bench.names else {})

    def _values(
        self, launch: DeploymentLaunch, template: Template, *, run: int
    ) -> dict[str, tuple[str, ...]]:
        folder = launch.folder / f"run-{run}" if template is self.bench else launch.folder
        own = {
            "folder": str(folder.resolve()),
            "result": str((folder / RESULT_NAME).resolve()),
            "url": launch.url,
            # No two runs of a study send the same prompts.
            "seed": str(1 + launch.number * self.runs + run),
            **({"model": self.environment["MODEL"]} if self.environment.get("MODEL") else {}),
        }
        values = {**launch.values, **own}
        for name in sorted(template.names - values.keys()):
            option = "--bench" if template is self.bench else "--command"
            raise SpecError(f"{option}: {{{name}}}: {_LACKS[name]}")
        return {name: (value,) for name, value in values.items()}


_LACKS: Final = {
    "model": "the environment has no MODEL; set it to the path or name of the weights",
    "concurrency": "the plan's traffic is an open load; use {rate}",
    "input_tokens": "the plan's traffic is a trace, which has its own lengths",
    "output_tokens": "the plan's traffic is a trace, which has its own lengths",
}
"""Placeholders that may have no value, and why."""


def _failed(code: int, *, said: str, tail: str) -> _Failed:
    """Judge a server that ended as launches are judged, and say with which words it ended."""
    judged = failure(code, tail=tail, wall_s=0.0)
    told = judged.reason if not judged.reason.startswith("exit code") else _last_line(tail)
    return _Failed(status=judged.status, reason=_with(said, told), tail=tail)


def _with(said: str, line: str) -> str:
    return f"{said}: {line}" if line else said


def _counted(found: BenchRun, values: Mapping[str, tuple[str, ...]]) -> BenchRun:
    """Count what did not complete, where a client that tells no failures knew how many to send."""
    if found.failed is not None or not values:
        return found
    sent = int(values["requests"][0])
    return found.model_copy(update={"failed": max(0, sent - found.completed)})


def _last_line(tail: str) -> str:
    return next(iter(_last_lines(tail)[-1:]), "")


def _last_lines(tail: str) -> tuple[str, ...]:
    lines = [_printable(line)[:LINE_LETTERS] for line in tail.splitlines() if line.strip()]
    return tuple(lines[-LAST_LINES:])


def _printable(line: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in line).strip()


def _run_line(run: int, runs: int, found: BenchRun) -> str:
    failed = f", {found.failed} failed" if found.failed else ""
    return (
        f"run {run} of {runs}: TTFT {format_s(found.ttft_s.mean)}, TPOT"
        f" {format_s(found.tpot_s.mean)}, {found.requests_per_s:.4g} requests/s{failed}"
    )
