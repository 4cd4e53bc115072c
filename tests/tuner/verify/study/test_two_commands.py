"""Two `moetune verify` on one plan, as they are typed, with real launches of the reference step."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from profilers.records import Profile
from tuner import api
from tuner.goals.train_folder import write_plan
from tuner.plans.folder import TRIALS_NAME, VERIFIED_NAME
from tuner.verify.records import Verified, read_trials

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 280.0


@pytest.fixture
def roomy(
    write_spec: Callable[..., Path],
    profile_for: Callable[[Path], Profile],
    store_profile: Callable[[Path, Profile], Path],
    tmp_path: Path,
) -> Path:
    """The folder of a plan for two devices with all of their memory."""
    spec = write_spec(tmp_path, pool={"devices_per_node": 2}, emit=("reference",))
    store_profile(tmp_path / "profile", profile_for(spec))
    made = api.plan(spec)
    write_plan(tmp_path / "plan", made.plan, spec=made.spec, profiles=made.profiles)
    return tmp_path / "plan"


def _verify(plan: Path, *options: str, log: Path) -> subprocess.Popen[bytes]:
    # Whoever comes second is asked to join; which one that is, nobody knows.
    words = [sys.executable, "-m", "tuner", "verify", str(plan), "--resume", "--steps", "3"]
    words += options
    # Who is killed leaves its folders.
    scratch = log.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    with log.open("wb") as stderr:
        return subprocess.Popen(
            words,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)},
        )


def _launches(*logs: Path) -> int:
    return sum(log.read_text().count("launching ") for log in logs)


def _await_launch(log: Path) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not _launches(log):
        assert time.monotonic() < until_s, log.read_text()
        time.sleep(0.05)


def test_two_share_the_trials_and_conclude_the_same(roomy: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    both = [_verify(roomy, "--trials", "4", log=log) for log in logs]
    assert [one.wait(timeout=LIMIT_S) for one in both] == [0, 0], [log.read_text() for log in logs]
    records = read_trials(roomy / TRIALS_NAME)
    assert [record.status for record in records] == ["ok"] * 4
    assert len({record.decision for record in records}) == 4
    assert _launches(*logs) == 4
    assert all(_launches(log) for log in logs)
    result = Verified.model_validate(json.loads((roomy / VERIFIED_NAME).read_text()))
    assert [trial.decision for trial in result.trials] == [record.decision for record in records]


def test_the_other_goes_on_when_one_is_killed(roomy: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    killed = _verify(roomy, "--trials", "3", log=logs[0])
    _await_launch(logs[0])
    other = _verify(roomy, "--trials", "3", log=logs[1])
    _await_launch(logs[1])
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert other.wait(timeout=LIMIT_S) == 0, logs[1].read_text()
    records = read_trials(roomy / TRIALS_NAME)
    assert len({record.decision for record in records}) == len(records) == 3
