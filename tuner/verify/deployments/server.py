"""Runs a deployment while it is measured, and ends it afterwards.

Its processes are found like those of trials (tuner/verify/termination.py); the command itself gets
SIGTERM first, so that srun, mpirun and docker end their remote processes. It is ready once every
address has returned status 200 and a single-token request has been served: engines report healthy
before a worker has run a step, and some workers crash at their first.

Not covered: a command that hands the deployment to a scheduler and returns, as `kubectl apply` and
`sbatch` do; wait for it in the command (`sbatch --wait`, `srun`), so that it ends with the command.
"""

import contextlib
import http.client
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tuner.errors import EnvironmentMissingError, SpecError
from tuner.verify.launcher import LOG_NAME, log_tail, printable, running
from tuner.verify.loop import NO_RESPONSE

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
        own = self.folder / LOG_NAME
        return "\n".join(text for file in (own, *logs) if (text := log_tail(file)))


@contextmanager
def serving(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str]
) -> Iterator[Server]:
    """Run a command that serves; end all of its processes when this is left.

    Args:
        command: program and arguments; no shell reads them.
        folder: of the server only; its output goes to a log there.
        environment: of the command.

    Raises:
        EnvironmentMissingError: the command's program does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logs = {"LOGS": str(folder / LOGS_NAME)}
    with running(
        command, folder=folder, environment={**environment, **logs}, patience_s=STOP_S
    ) as process:
        yield Server(process=process, folder=folder)


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
        with _opened(f"{url}/v1/models", timeout_s=RESPONSE_TIMEOUT_S, key=key) as response:
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
        with _opened(address, data=data, timeout_s=timeout_s, key=key) as response:
            response.read(MOST_BYTES)
            return "" if response.status == OK else f"status {response.status}"
    except urllib.error.HTTPError as error:
        with error:
            words = error.read(MOST_WORDS) if data else b""
        return f"status {error.code} {printable(words.decode(errors='replace'))}".rstrip()
    except urllib.error.URLError as error:
        return printable(f"{error.reason}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return printable(str(error)) or type(error).__name__


def _opened(
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
