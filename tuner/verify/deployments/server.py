"""A deployment that runs while it is measured, and is gone afterwards.

Its processes are found as those of trials are (tuner/verify/termination.py); the command itself is
asked first, so that srun, mpirun and docker end what they started elsewhere. It answers once every
address has returned status 200 and one request of a token has been served: engines call themselves
healthy before a worker has run a step, and some workers end at their first.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tuner.errors import EnvironmentMissingError, SpecError
from tuner.verify.build_locks import release_builds
from tuner.verify.launcher import LOG_NAME, UNBUFFERED, log_tail
from tuner.verify.termination import end_marked, start_marked

LOGS_NAME: Final = "logs"
"""Where emitted scripts write a log for each server (their variable LOGS)."""

ANSWER_S: Final = 5.0
"""That one question may take."""

FIRST_REQUEST_S: Final = 300.0
"""That one attempt at a first request may take: engines compile and capture for it."""

MOST_BYTES: Final = 1 << 20
"""Of an answer."""
MOST_WORDS: Final = 160
"""Of a refusal."""
REFUSED: Final = ("status 401", "status 403")
"""Refusals that no patience helps against."""

STOP_S: Final = 30.0
"""That the command has to end what it started, elsewhere too, before all of it is killed here."""

NO_ANSWER: Final = "did not answer within"
"""In the reason of a deployment that never answered."""

OK: Final = 200
PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A command that serves."""

    process: subprocess.Popen[bytes]
    folder: Path

    def ended(self) -> str:
        """Say with which code the command ended; nothing while it runs."""
        code = self.process.poll()
        return "" if code is None else f"the server ended with exit code {code}"

    def tail(self) -> str:
        """Return the ends of all its logs, the one written last at the end."""
        logs = [file for file in (self.folder / LOGS_NAME).glob("*.log") if file.is_file()]
        logs.sort(key=lambda file: (file.stat().st_mtime_ns, file.name))
        own = self.folder / LOG_NAME
        return "\n".join(text for file in (own, *logs) if (text := log_tail(file)))


@contextmanager
def serving(
    command: Sequence[str], *, folder: Path, environment: Mapping[str, str]
) -> Iterator[Server]:
    """Run a command that serves; whatever it started is ended when this is left.

    Args:
        command: program and arguments; no shell reads them.
        folder: of the server alone; its output goes to a log there.
        environment: of the command.

    Raises:
        EnvironmentMissingError: the command's program does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark, since_s = str(folder.resolve()), time.time()
    process: subprocess.Popen[bytes] | None = None
    try:
        with (folder / LOG_NAME).open("wb") as log:
            try:
                process = start_marked(
                    command,
                    folder=folder,
                    log=log,
                    environment={**UNBUFFERED, **environment, "LOGS": str(folder / LOGS_NAME)},
                )
            except OSError as error:
                raise EnvironmentMissingError(
                    f"--command: {command[0]}: {error.strerror}"
                ) from error
        yield Server(process=process, folder=folder)
    finally:
        try:
            if process is not None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=STOP_S)
        finally:
            end_marked(mark)
            if process is not None:
                process.wait()
            release_builds(environment, since_s=since_s)


def await_answers(
    server: Server,
    addresses: Sequence[str],
    *,
    limit_s: float,
    watch_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait until every address answers; say what kept one from it, or nothing.

    Args:
        server: that should answer.
        addresses: to ask, http or https.
        limit_s: for all of them together.
        watch_s: between two rounds of questions.
        clock: seconds.
        sleep: waits.
    """
    start_s = clock()
    silent, said = list(addresses), "nothing listens there"
    while True:
        while silent and not (said := _refusal(silent[0])):
            silent.pop(0)
        if ended := server.ended():
            return f"{ended} before it answered" if silent else ended
        if not silent:
            return ""
        if clock() - start_s + watch_s > limit_s:
            return f"{silent[0]} {NO_ANSWER} {limit_s:.0f} s: {said}"
        sleep(watch_s)


def await_request(
    server: Server,
    url: str,
    *,
    model: str,
    key: str,
    limit_s: float,
    watch_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait until a request of one token is served; say what kept it from that, or nothing.

    Args:
        server: that should answer.
        url: where an OpenAI-compatible API is.
        model: its name there, where the API does not say it.
        key: that the API wants; empty: none.
        limit_s: for all attempts together.
        watch_s: between two attempts.
        clock: seconds.
        sleep: waits.
    """
    start_s = clock()
    while True:
        left_s = limit_s - (clock() - start_s)
        named = _named_model(url, key) or model
        body = {"model": named, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        said = _refusal(
            f"{url}/v1/completions",
            data=json.dumps(body).encode(),
            timeout_s=min(max(left_s, ANSWER_S), FIRST_REQUEST_S),
            key=key,
        )
        # A server whose worker died takes a moment to end.
        if said:
            sleep(watch_s)
        if ended := server.ended():
            return f"{ended} at its first request"
        if not said:
            return ""
        if said.startswith(REFUSED):
            return f"{url} refuses a first request ({said}): set OPENAI_API_KEY"
        if clock() - start_s + watch_s > limit_s:
            return f"{url} is healthy, but {NO_ANSWER} {limit_s:.0f} s to a first request: {said}"


def _named_model(url: str, key: str) -> str:
    """Return how the API calls its first model; empty where it does not say."""
    try:
        with _opened(f"{url}/v1/models", timeout_s=ANSWER_S, key=key) as answer:
            listed = json.loads(answer.read(MOST_BYTES))
        name = listed["data"][0]["id"]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return name if isinstance(name, str) else ""


def await_free(
    addresses: Sequence[str],
    *,
    limit_s: float,
    watch_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until nobody listens at the addresses; a server that ended may hold its port a moment.

    Raises:
        EnvironmentMissingError: somebody still does.
    """
    start_s = clock()
    for address in addresses:
        while _is_listened_at(address):
            if clock() - start_s + watch_s > limit_s:
                raise EnvironmentMissingError(
                    f"{address}: something listens there before the deployment was started; end it,"
                    " or name another address with --url and --health"
                )
            sleep(watch_s)


def checked_address(address: str, *, option: str) -> str:
    """Return an address of HTTP as it stands.

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
    address: str, *, data: bytes | None = None, timeout_s: float = ANSWER_S, key: str = ""
) -> str:
    """Say why an address does not answer, to what is posted there; nothing when it does."""
    try:
        with _opened(address, data=data, timeout_s=timeout_s, key=key) as answer:
            answer.read(MOST_BYTES)
            return "" if answer.status == OK else f"status {answer.status}"
    except urllib.error.HTTPError as error:
        with error:
            words = error.read(MOST_WORDS) if data else b""
        return f"status {error.code} {_printable(words.decode(errors='replace'))}".rstrip()
    except urllib.error.URLError as error:
        return _printable(f"{error.reason}")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _printable(str(error)) or type(error).__name__


def _opened(
    address: str, *, timeout_s: float, key: str, data: bytes | None = None
) -> http.client.HTTPResponse:
    """Ask an address, or post JSON there."""
    # Servers are asked directly: a proxy for the world outside knows nothing of them.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Content-Type": "application/json"} if data else {}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    asked = urllib.request.Request(address, data=data, headers=headers)
    opened: http.client.HTTPResponse = opener.open(asked, timeout=timeout_s)
    return opened


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _is_listened_at(address: str) -> bool:
    parts = urlsplit(address)
    with contextlib.suppress(OSError):
        place = (parts.hostname or "", parts.port or PORTS[parts.scheme])
        with socket.create_connection(place, timeout=ANSWER_S):
            return True
    return False
