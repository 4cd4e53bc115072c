"""Whoever is told a second time to end still ends what was started, and only then leaves."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.expect import present
from tests.rows import each_row
from tuner.verify import termination as ending
from tuner.verify.termination import (
    SESSION_NAME,
    TRIAL_MARK,
    end_marked,
    ensure_ended,
    single_interrupt,
    start_marked,
)

Deaf = Callable[..., subprocess.Popen[str]]

LONG_S = 60.0
DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"asked\\n"))
print("deaf", flush=True)
while True:
    time.sleep(600)
"""


def _leave(_number: int, _stack: object) -> None:
    raise SystemExit(143)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait long for processes, and leave by an exception, as the command line does."""
    monkeypatch.setattr(ending, "GRACE_S", LONG_S)
    former = {one: signal.signal(one, _leave) for one in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


@pytest.fixture
def deaf() -> Iterator[Deaf]:
    """Start a process of a mark that SIGKILL alone ends: deaf(mark, when_asked=...)."""
    with contextlib.ExitStack() as started:

        def start(
            mark: Path, *, on_sigterm: Callable[[], None] = lambda: None
        ) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-S", "-c", DEAF],
                env=os.environ | {TRIAL_MARK: str(mark.resolve())},
                stdout=subprocess.PIPE,
                text=True,
            )
            started.enter_context(process)
            heard = present(process.stdout)
            assert heard.readline() == "deaf\n"

            def listen() -> None:
                if heard.readline() == "asked\n":
                    on_sigterm()

            listener = threading.Thread(target=listen)
            listener.start()
            started.callback(listener.join)
            started.callback(process.kill)
            return process

        yield start


def _send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _send_together() -> None:
    both = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, both)
    for number in both:
        signal.raise_signal(number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, both)


@each_row("second", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@each_row(("first", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_second_signal_shortens_the_grace_and_not_the_ending(
    tmp_path: Path,
    deaf: Deaf,
    first: signal.Signals,
    raised: type[BaseException],
    second: signal.Signals,
) -> None:
    left = deaf(tmp_path, on_sigterm=_send(second))
    begin_s = time.monotonic()
    with pytest.raises(raised), ensure_ended(str(tmp_path.resolve())):
        signal.raise_signal(first)
    assert left.poll() is not None
    assert time.monotonic() - begin_s < LONG_S / 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is _leave


@each_row("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_inside_hastens_the_ending_around_it(second: signal.Signals) -> None:
    def interrupted() -> None:
        with single_interrupt():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(second)

    with single_interrupt() as around:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert around.came
    assert signal.getsignal(signal.SIGTERM) is _leave


def test_signals_that_come_together_leave_nothing(tmp_path: Path, deaf: Deaf) -> None:
    left = deaf(tmp_path, on_sigterm=_send(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), ensure_ended(str(tmp_path.resolve())):
        _send_together()
    assert left.poll() is not None


def test_a_signal_that_comes_while_processes_are_ended_is_heeded_afterwards(
    tmp_path: Path, deaf: Deaf
) -> None:
    left = deaf(tmp_path, on_sigterm=_send(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        end_marked(str(tmp_path.resolve()))
    assert left.poll() is not None


def test_processes_are_ended_from_another_thread_too(
    tmp_path: Path, deaf: Deaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "GRACE_S", 0.3)
    left, ended = deaf(tmp_path), []

    def run() -> None:
        with ensure_ended(str(tmp_path.resolve())):
            pass
        ended.append(end_marked(str(tmp_path.resolve())))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended == [True]
    assert left.poll() is not None


def test_folders_inside_belong_to_a_mark_and_those_beside_do_not(
    tmp_path: Path, deaf: Deaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "GRACE_S", 0.3)
    inside, beside = deaf(tmp_path / "1/run-0"), deaf(tmp_path / "10")
    assert end_marked(str((tmp_path / "1").resolve()))
    assert inside.poll() is not None
    assert beside.poll() is None


UNMARKED = """
import subprocess, sys
child = "import sys, time; print('up', flush=True); time.sleep(600)"
kept = subprocess.Popen([sys.executable, "-S", "-c", child], env={}, stdout=subprocess.PIPE)
kept.stdout.readline()
print(kept.pid, flush=True)
"""
"""A server that dies and leaves a process whose environment says nothing, as one that renamed
itself."""


def test_who_wrote_over_its_environment_is_known_by_its_session(tmp_path: Path) -> None:
    folder = tmp_path / "trials" / "0"
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    with log.open("wb") as stream:
        command = [sys.executable, "-S", "-c", UNMARKED]
        process = start_marked(command, folder=folder, log=stream, environment=os.environ)
        assert process.wait(timeout=LONG_S) == 0
    left = psutil.Process(int(log.read_text()))
    noted = folder / SESSION_NAME
    true = noted.read_text()
    # Another start of the system, and a number that somebody else has by now: nobody is ended.
    session = json.loads(true)
    for changes in ({"boot": "another"}, {"began_s": time.time() + LONG_S}, {"session": "x"}):
        noted.write_text(json.dumps(session | changes))
        assert end_marked(str(tmp_path))
        assert left.is_running()
    other = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    try:
        noted.write_text(json.dumps(session | {"session": other.pid, "began_s": 1.0}))
        assert end_marked(str(tmp_path))
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    noted.write_text(json.dumps(session | {"session": os.getsid(0)}))
    assert end_marked(str(tmp_path))
    noted.write_text(true)
    assert end_marked(str(tmp_path))
    assert not left.is_running()


SHARING = DEAF.replace(
    "import os, signal, time",
    """
import os, signal, time
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=4096).name, flush=True)""",
)
"""As DEAF, and holds shared memory."""


def test_who_must_be_killed_leaves_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "GRACE_S", 5.0)
    mark = {TRIAL_MARK: str(tmp_path.resolve())}
    with subprocess.Popen(
        [sys.executable, "-S", "-c", SHARING], env=os.environ | mark, stdout=subprocess.PIPE
    ) as sharing:
        assert sharing.stdout is not None
        shared = Path("/dev/shm") / sharing.stdout.readline().decode().strip()
        assert sharing.stdout.readline() == b"deaf\n"
        assert shared.is_file()
        assert end_marked(str(tmp_path.resolve()))
    assert not shared.exists()
