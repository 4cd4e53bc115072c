"""What a verification that was killed has started ends without it, and nothing else does."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.expect import present
from tuner.plans.folder import TRIALS_NAME
from tuner.verify import termination as leftovers
from tuner.verify.termination import TRIAL_MARK, end_leftovers, register_scratch

Sleeper = Callable[[Path], subprocess.Popen[bytes]]

LIMIT_S = 60.0
FOREVER = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    """Start a process that carries the mark of a trial's folder."""
    with contextlib.ExitStack() as started:

        def start(trial: Path) -> subprocess.Popen[bytes]:
            trial.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
            process = subprocess.Popen(command, env=os.environ | {TRIAL_MARK: str(trial.resolve())})
            started.callback(process.wait)
            started.callback(process.kill)
            return process

        yield start


@pytest.fixture
def own_scratch(tmp_path: Path) -> dict[str, str]:
    """An environment whose temporary directory is the test's: who is killed leaves folders."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return os.environ | {"TMPDIR": str(scratch)}


def _await(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_those_who_are_alive_keep_what_they_run(tmp_path: Path, sleeper: Sleeper) -> None:
    trials, scratch = tmp_path / "trials", tmp_path / "moetune-alive"
    running = sleeper(scratch / "0000")
    with register_scratch(trials, scratch=scratch):
        assert end_leftovers(trials) == 0
        assert running.poll() is None
    assert list(trials.iterdir()) == []


def test_what_the_dead_left_is_ended_and_what_others_run_is_not(
    tmp_path: Path, sleeper: Sleeper
) -> None:
    trials, scratch = tmp_path / "trials", tmp_path / "moetune-dead"
    left, other = sleeper(scratch / "0003"), sleeper(tmp_path / "moetune-other/0003")
    with register_scratch(trials, scratch=scratch):
        (file,) = trials.iterdir()
        text = file.read_bytes()
    # As a kill leaves it: there, and locked by nobody.
    file.write_bytes(text)
    (trials / file.name.replace(os.uname().nodename, "elsewhere")).write_bytes(text)
    assert end_leftovers(trials) == 1
    assert left.poll() is not None
    assert other.poll() is None
    assert [one.name.partition("@")[0] for one in trials.iterdir()] == ["commands.elsewhere"]
    assert end_leftovers(trials) == 0


def test_word_of_what_could_not_be_ended_stays_for_the_next_one(
    tmp_path: Path, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, scratch = tmp_path / "trials", tmp_path / "moetune-stuck"
    left = sleeper(scratch / "0003")
    with monkeypatch.context() as stuck:
        stuck.setattr(leftovers, "end_marked", lambda _mark: False)
        with register_scratch(trials, scratch=scratch):
            pass
        assert end_leftovers(trials) == 0
    # The folders of a verification that has ended are gone.
    (scratch / "0003").rmdir()
    scratch.rmdir()
    assert end_leftovers(trials) == 1
    assert left.poll() is not None
    assert list(trials.iterdir()) == []


def test_a_damaged_note_ends_nothing(tmp_path: Path, sleeper: Sleeper) -> None:
    trials, scratch = tmp_path / "trials", tmp_path / "moetune-other"
    other = sleeper(scratch / "0003")
    with register_scratch(trials, scratch=tmp_path / "moetune-dead"):
        (file,) = trials.iterdir()
    for text in (b"", b"/", os.fsencode(tmp_path), b"\xff\x00"):
        file.write_bytes(text)
        assert end_leftovers(trials) == 1
    assert other.poll() is None


# Seconds each, of a real moetune: nothing less has Python's own handling of signals.
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_second_signal_leaves_no_command_that_runs_on(
    datasheet_plan: Path, tmp_path: Path, own_scratch: dict[str, str], number: signal.Signals
) -> None:
    told = tmp_path / "pid"
    program = tmp_path / "deaf.py"
    program.write_text("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER)
    command = f"{sys.executable} -S {program} {told}"
    words = ["verify", str(datasheet_plan), "--launcher", "command", "--command", command]
    with subprocess.Popen(
        [sys.executable, "-m", "tuner", *words], stderr=subprocess.PIPE, env=own_scratch
    ) as moetune:
        _await(lambda: told.exists() and told.read_text() != "")
        left = psutil.Process(int(told.read_text()))
        try:
            for _ in range(2):
                moetune.send_signal(number)
                time.sleep(0.5)
            assert moetune.wait(timeout=LIMIT_S) in (130, 143)
            assert not left.is_running()
        finally:
            moetune.kill()
            with contextlib.suppress(psutil.Error):
                left.kill()
    assert not list((datasheet_plan / TRIALS_NAME).glob("commands*"))


STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
started = [
    subprocess.Popen([sys.executable, "-S", "-c", child], **how)
    for how in ({}, {"start_new_session": True}, {"env": {}})
]
with open(sys.argv[1] + ".new", "w") as file:
    file.write(" ".join(str(one.pid) for one in started) + f" {os.getpid()}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
started[0].wait()
"""
"""A command and children, all deaf to SIGTERM: one in its session, one in a session of its own, one
whose environment says nothing, as of one that renamed itself."""


def test_a_verification_that_is_killed_leaves_nothing(
    datasheet_plan: Path, tmp_path: Path, own_scratch: dict[str, str]
) -> None:
    told, program = tmp_path / "pids", tmp_path / "stubborn.py"
    program.write_text(STUBBORN)
    # The shell between them stands for a launcher: what runs is no child of moetune's.
    command = f"bash -c '{sys.executable} -S {program} {told} & wait'"
    words = ["verify", str(datasheet_plan), "--launcher", "command", "--command", command]
    scratch = Path(own_scratch["TMPDIR"])
    with subprocess.Popen(
        [sys.executable, "-m", "tuner", *words], stderr=subprocess.DEVNULL, env=own_scratch
    ) as moetune:
        try:
            _await(told.exists)
            assert list(scratch.glob("moetune-*"))
        finally:
            moetune.send_signal(signal.SIGKILL)
    left = [psutil.Process(int(pid)) for pid in told.read_text().split()]
    try:
        _, alive = psutil.wait_procs(left, timeout=LIMIT_S)
        assert alive == []
    finally:
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
    _await(lambda: not list(scratch.glob("moetune-*")))
    assert not list((datasheet_plan / TRIALS_NAME).glob("commands*"))


def test_a_guardian_that_is_killed_leaves_the_rest_to_the_next_verification(
    tmp_path: Path, sleeper: Sleeper
) -> None:
    trials, scratch = tmp_path / "trials", tmp_path / "moetune-unguarded"
    left = sleeper(scratch / "0000")
    hold = f"""
from pathlib import Path
from tuner.verify.termination import register_scratch
with register_scratch(Path({str(trials)!r}), scratch=Path({str(scratch)!r})):
    print("up", flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as killed:
        assert present(killed.stdout).readline() == b"up\n"
        (guardian,) = psutil.Process(killed.pid).children()
        # It is deaf to what a scheduler sends to all at once.
        guardian.terminate()
        time.sleep(0.2)
        assert guardian.status() != psutil.STATUS_ZOMBIE
        guardian.kill()
        killed.kill()
    time.sleep(0.2)
    assert left.poll() is None
    assert end_leftovers(trials) == 1
    assert left.poll() is not None
