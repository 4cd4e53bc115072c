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
client that fails, does.

The server's processes are found like those of trials (tuner/verify/termination.py); the command
itself gets SIGTERM first, so that srun, mpirun and docker end their remote processes. It is ready
once every address has returned status 200 and a single-token request has been served: engines
report healthy before a worker has run a step, and some workers crash at their first.

Not covered: parallel deployments; ports and devices are the user's. A command that hands the
deployment to a scheduler and returns, as `kubectl apply` and `sbatch` do; wait for it in the
command (`sbatch --wait`, `srun`), so that it ends with the command.
"""

import contextlib
import http.client
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tuner.config.serve import ServeDecision
from tuner.engines.metrics.benchmark_run import BenchmarkRun
from tuner.errors import EnvironmentMissingError, SpecError
from tuner.plans.serve import ServePlan, ServePrediction
from tuner.units import format_s
from tuner.verify.command import Template, fill_template
from tuner.verify.deployments.clients import RESULT_NAME, Client
from tuner.verify.deployments.records import ServeTrialRecord
from tuner.verify.launcher import (
    LOG_NAME,
    failure_result,
    log_tail,
    printable,
    run_command,
    running,
)
from tuner.verify.loop import NO_RESPONSE
from tuner.verify.records import Origin, TrialStatus

LOGS_NAME: Final = "logs"
"""Folder where emitted scripts write a log for each server (their variable LOGS)."""

RESPONSE_TIMEOUT_S: Final = 5.0
"""Timeout of a health check."""

FIRST_REQUEST_S: Final = 300.0
"""Timeout of a first request: engines compile and capture CUDA graphs for it."""

MOST_BYTES: Final = 1 << 20
"""Bytes of a response that are read."""
MOST_WORDS: Final = 160
"""Bytes of an error body that are read."""
REFUSED: Final = ("status 401", "status 403")
"""Errors that a retry does not fix."""

STOP_S: Final = 30.0
"""Grace period for the command to end its processes, remote ones too, before all are killed."""


OK: Final = 200
PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A command that serves."""

    process: subprocess.Popen[bytes]
    folder: Path

    def ended(self) -> str:
        """Return the exit message of the command; empty while it runs."""
        code = self.process.poll()
        return "" if code is None else f"the server ended with exit code {code}"

    def tail(self) -> str:
        """Return the tails of all its logs, the latest one last."""
        logs = [file for file in (self.folder / LOGS_NAME).glob("*.log") if file.is_file()]
        logs.sort(key=lambda file: (file.stat().st_mtime_ns, file.name))
        server_log = self.folder / LOG_NAME
        return "\n".join(text for file in (server_log, *logs) if (text := log_tail(file)))


def await_ready(
    server: Server,
    addresses: Sequence[str],
    url: str,
    *,
    model: str,
    key: str,
    limit_s: float,
    watch_s: float,
) -> str:
    """Wait until a deployment serves; return why it does not, or an empty string.

    Args:
        server: the deployment.
        addresses: health endpoints, http or https; each must respond with 200.
        url: of the OpenAI-compatible API, which must then serve a single-token request.
        model: its name there, if the API does not list it.
        key: API key; empty: none.
        limit_s: for all of it together; a first request gets some seconds in any case.
        watch_s: polling interval.
    """
    until_s = time.monotonic() + limit_s
    silent = list(addresses)
    while True:
        message = ""
        while silent and not (message := _refusal(silent[0])):
            silent.pop(0)
            until_s = max(until_s, time.monotonic() + RESPONSE_TIMEOUT_S)
        if not silent:
            message = _first_request(url, model=model, key=key, until_s=until_s)
        if message:
            # A server whose worker has died takes a moment to exit.
            time.sleep(watch_s)
        if ended := server.ended():
            return f"{ended} {'before it answered' if silent else 'at its first request'}"
        if not message:
            return ""
        if message.startswith(REFUSED) and not silent:
            return f"{url} refuses a first request ({message}): set OPENAI_API_KEY"
        if time.monotonic() > until_s:
            limit = f"{NO_RESPONSE} {limit_s:.0f} s"
            if silent:
                return f"{silent[0]} {limit}: {message}"
            return f"{url} is healthy, but {limit} to a first request: {message}"


def _first_request(url: str, *, model: str, key: str, until_s: float) -> str:
    """Return why a request for one token fails; empty if it is served."""
    named = named_model(url, key) or model
    body = {"model": named, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
    left_s = max(until_s - time.monotonic(), RESPONSE_TIMEOUT_S)
    return _refusal(
        f"{url}/v1/completions",
        data=json.dumps(body).encode(),
        timeout_s=min(left_s, FIRST_REQUEST_S),
        key=key,
    )


def named_model(url: str, key: str) -> str:
    """Return the name of the API's first model; empty if it lists none."""
    try:
        with opened(f"{url}/v1/models", timeout_s=RESPONSE_TIMEOUT_S, key=key) as response:
            listed = json.loads(response.read(MOST_BYTES))
        name = listed["data"][0]["id"]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return name if isinstance(name, str) else ""


def await_free(addresses: Sequence[str], *, limit_s: float, watch_s: float) -> None:
    """Wait until nothing listens at the addresses; a server that ended may keep its port briefly.

    Raises:
        EnvironmentMissingError: something still does.
    """
    until_s = time.monotonic() + limit_s
    for address in addresses:
        while _is_listened_at(address):
            if time.monotonic() + watch_s > until_s:
                raise EnvironmentMissingError(
                    f"{address}: something listens there before the deployment was started; end it,"
                    " or name another address with --url and --health"
                )
            time.sleep(watch_s)


def check_address(address: str, *, option: str) -> str:
    """Return a valid HTTP address unchanged.

    Raises:
        SpecError: it is none.
    """
    try:
        parts = urlsplit(address)
        usable = parts.scheme in PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not address.isprintable() or " " in address:
        raise SpecError(f"{option} {address!r} is no address such as http://127.0.0.1:8000")
    return address


def _refusal(
    address: str, *, data: bytes | None = None, timeout_s: float = RESPONSE_TIMEOUT_S, key: str = ""
) -> str:
    """Return why a GET, or POST of `data`, fails; empty if it returns 200."""
    try:
        with opened(address, data=data, timeout_s=timeout_s, key=key) as response:
            response.read(MOST_BYTES)
            return "" if response.status == OK else f"status {response.status}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return request_failure(error)


def request_failure(error: Exception) -> str:
    """Return why a request failed, in one line: the status and the server's words, or the error."""
    if isinstance(error, urllib.error.HTTPError):
        with error:
            words = error.read(MOST_WORDS).decode(errors="replace")
        return f"status {error.code} {printable(words)}".rstrip()
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return printable(str(reason)) or type(error).__name__


def opened(
    address: str, *, timeout_s: float, key: str, data: bytes | None = None
) -> http.client.HTTPResponse:
    """Send a GET, or POST JSON."""
    # No proxy: servers are local.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Content-Type": "application/json"} if data else {}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(address, data=data, headers=headers)
    opened: http.client.HTTPResponse = opener.open(request, timeout=timeout_s)
    return opened


def _is_listened_at(address: str) -> bool:
    parts = urlsplit(address)
    with contextlib.suppress(OSError):
        place = (parts.hostname or "", parts.port or PORTS[parts.scheme])
        with socket.create_connection(place, timeout=RESPONSE_TIMEOUT_S):
            return True
    return False


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
        folder = launch.folder / "server"
        folder.mkdir(parents=True, exist_ok=True)
        environment = {**self.environment_of(launch), "LOGS": str(folder / LOGS_NAME)}
        with running(command, folder=folder, environment=environment, patience_s=STOP_S) as process:
            server = Server(process=process, folder=folder)
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
        run_values = {
            "folder": str(folder.resolve()),
            "result": str((folder / RESULT_NAME).resolve()),
            "url": launch.url,
            **({"model": self.environment["MODEL"]} if self.environment.get("MODEL") else {}),
        }
        values = {**launch.values, **run_values}
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
