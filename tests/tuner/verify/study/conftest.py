"""A PostgreSQL server of the tests' own, from the system's packages."""

import getpass
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

START_S = 60.0
INIT = ("-U", "moetune", "-E", "UTF8", "--no-sync", "--no-instructions", "--auth=scram-sha-256")
UNPRIVILEGED = ("postgres", "nobody")


class Server(NamedTuple):
    """A server that asks for a password."""

    url: str
    """Without the password."""
    password: str


def _programs() -> Path | None:
    result = shutil.which("initdb")
    if result is not None:
        return Path(result).resolve().parent
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return debian[-1].parent if debian else None


def _as_user() -> tuple[str | None, list[str]]:
    """Whom to run the server as, and the words that do; it refuses to be root's."""
    if os.geteuid() != 0:
        return getpass.getuser(), []
    if shutil.which("setpriv") is None:
        return None, []
    for name in UNPRIVILEGED:
        if subprocess.run(["id", name], capture_output=True, check=False).returncode == 0:
            words = ["setpriv", f"--reuid={name}", "--regid=nogroup", "--clear-groups", "--"]
            return name, words
    return None, []


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """Run a server on a socket of its own."""
    pytest.importorskip("psycopg", reason="needs the driver of PostgreSQL: psycopg")
    programs = _programs()
    user, as_user = _as_user()
    if programs is None or user is None:
        pytest.skip("needs a PostgreSQL server (Debian: postgresql) and a user to run it as")
    # Not under pytest's own folder: that is root's alone, and sockets need short paths.
    place = Path(tempfile.mkdtemp(prefix="moetune-pg-", dir="/tmp"))
    password = secrets.token_urlsafe(12)
    try:
        (place / "password").write_text(password)
        data = place / "data"
        data.mkdir(mode=0o700)
        if as_user:
            for path in (place, place / "password", data):
                shutil.chown(path, user)
        quick = ["-c", "fsync=off", "-c", "listen_addresses=", "-c", "max_connections=60"]
        subprocess.run(
            [*as_user, programs / "initdb", "-D", data, *INIT, f"--pwfile={place / 'password'}"],
            check=True,
            capture_output=True,
            cwd=place,
        )
        with (place / "log").open("wb") as log:
            server = subprocess.Popen(
                [*as_user, programs / "postgres", "-D", data, "-k", place, *quick],
                stdout=log,
                stderr=log,
                cwd=place,
            )
        try:
            _await(programs, place, server)
            yield Server(url=f"postgresql://moetune@/postgres?host={place}", password=password)
        finally:
            server.terminate()
            server.wait(timeout=START_S)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _await(programs: Path, place: Path, server: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_S
    ready = [str(programs / "pg_isready"), "-q", "-h", str(place)]
    while subprocess.run(ready, check=False).returncode != 0:
        if server.poll() is not None or time.monotonic() > until_s:
            pytest.fail((place / "log").read_text()[-2000:])
        time.sleep(0.05)
