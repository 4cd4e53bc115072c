"""What a build that was ended leaves, and what it must not take from others."""

import os
import sys
import time
from pathlib import Path

import pytest

from tuner.goals.verify import command_trials
from tuner.verify.build_locks import abandoned_locks, release_builds
from tuner.verify.launcher import run_command, timeout_result

BUILDS = """
import os, sys, time
folder = os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "py311_cpu", "cpu_adam")
os.makedirs(folder, exist_ok=True)
held = os.open(os.path.join(folder, "lock"), os.O_CREAT | os.O_EXCL)
time.sleep(60)
"""


def test_a_trial_that_is_ended_while_it_builds_leaves_no_lock(tmp_path: Path) -> None:
    builds = tmp_path / "builds"
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(builds)}
    lock = builds / "py311_cpu" / "cpu_adam" / "lock"
    trial = tmp_path / "trial"
    trial.mkdir()
    ran = run_command(
        (sys.executable, "-S", "-c", BUILDS),
        folder=trial,
        deadline_s=60.0,
        environment=environment,
        watch=lambda: "seen" if lock.exists() else "",
    )
    assert ran.stopped == "seen"
    assert not lock.exists()


def test_locks_that_are_held_or_older_than_the_trial_stay_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    held, old = (tmp_path / name / "lock" for name in ("held", "old"))
    for lock in (held, old):
        lock.parent.mkdir()
    since_s = time.time()
    old.touch()
    os.utime(old, (since_s - 100.0, since_s - 100.0))
    number = os.open(held, os.O_CREAT | os.O_EXCL)
    try:
        assert abandoned_locks(environment) == (old,)
        lines: list[str] = []
        command_trials(command="true", metrics="jsonl", on_message=lines.append)
        assert lines == [f"trials that compile the same wait for {old}: remove it if no build runs"]
        release_builds(environment, since_s=since_s)
        assert held.exists()
        assert old.exists()
    finally:
        os.close(number)
    assert set(abandoned_locks(environment)) == {held, old}
    release_builds(environment, since_s=since_s)
    assert (held.exists(), old.exists()) == (False, True)
    result = timeout_result(9.0, wall_s=9.0, steps=0, waits_for=abandoned_locks(environment))
    assert result.reason.endswith(f"{old}, left by a killed build: remove it")
    assert abandoned_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path / "none")}) == ()
