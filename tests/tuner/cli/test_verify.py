"""`moetune verify` as it is typed; what it launches is tested in tests/tuner/verify."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.expect import contains, present
from tests.rows import each_row
from tests.tuner.cli.refusals import output, refusal
from tests.tuner.verify.testing import FakeLauncher
from tuner import api
from tuner.cli import app as frame
from tuner.cli.plan_text import verified_text
from tuner.cli.trials import trial_lines
from tuner.config.train_words import short_decision
from tuner.plans.folder import TRIALS_NAME, VERIFIED_NAME
from tuner.verify.records import Verified
from tuner.verify.verification import Effort

Captured = pytest.CaptureFixture[str]
Launcher = Callable[..., FakeLauncher]


def _verify(folder: Path, launcher: FakeLauncher, *, trials: int) -> Verified:
    return api.verify(
        folder,
        effort=Effort(trials=trials, steps=5),
        resume=False,
        watcher=trial_lines(),
        launch=launcher,
    )


def test_each_trial_is_told_on_stderr_as_it_runs(
    planned: Path, capsys: Captured, hidden_launcher: Launcher
) -> None:
    _verify(
        planned,
        hidden_launcher(planned, ends={1: "timeout", 2: "crashed", 3: "crashed"}),
        trials=4,
    )
    printed = capsys.readouterr()
    assert printed.out == ""
    first, ended, second, failed, *_, again = printed.err.splitlines()
    assert first.startswith("launching tp1 ")
    assert first.endswith(" a step predicted")
    contains(ended, "  trial 0, tp1 ", ": ok: ", " measured, ")
    assert second.startswith("launching ")
    contains(failed, "  trial 1, ", ": timeout: fake timeout: not measured, ")
    contains(again, "  trial 3, ", ": crashed like trial 2: not measured, ")


def test_resumed_trials_are_concluded_without_launching(
    planned: Path, capsys: Captured, hidden_launcher: Launcher
) -> None:
    result = _verify(planned, hidden_launcher(planned), trials=4)
    capsys.readouterr()
    assert frame.run(["verify", str(planned), "--resume", "--trials", "4"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    contains(
        printed.out,
        f"winner         {short_decision(present(result.winner))}: ",
        "first choice   ",
        "recalibrated from the others",
        "activations    largest error 0.0 %",
        " by the model",
        "\n- the profile describes another machine",
    )
    assert printed.out.rstrip().endswith(f"launch files: {planned / 'launch'}")
    text = output(capsys, ["verify", planned, "--resume", "--trials", "4", "--json"])
    assert text == (planned / VERIFIED_NAME).read_text()
    assert Verified.model_validate_json(text) == result


def test_trials_that_all_failed_are_exit_code_1(
    planned: Path, capsys: Captured, hidden_launcher: Launcher
) -> None:
    _verify(planned, hidden_launcher(planned, otherwise="crashed"), trials=2)
    assert "no trial ran: nothing is verified" in output(
        capsys, ["verify", planned, "--resume", "--trials", "2"], code=1
    )


def test_existing_trials_need_resume_and_a_damaged_record_is_named(
    planned: Path, capsys: Captured, hidden_launcher: Launcher
) -> None:
    _verify(planned, hidden_launcher(planned), trials=1)
    line = refusal(capsys, ["verify", planned])
    assert "holds 1 trials already: add --resume to continue, or plan anew" in line
    (planned / TRIALS_NAME / "0000.json").write_text("{")
    line = refusal(capsys, ["verify", planned, "--resume"])
    contains(line, "0000.json", "delete it and go on with --resume")


def test_a_slower_first_choice_is_said_with_its_regret(
    planned: Path, hidden_launcher: Launcher
) -> None:
    result = _verify(planned, hidden_launcher(planned), trials=2)
    slower = result.model_copy(update={"regret_ratio": 0.125, "tie": False})
    assert "first choice   12.5 % behind the winner\n" in verified_text(slower, folder=planned)
    assert "behind the winner (a tie: less than the noise)" in verified_text(
        slower.model_copy(update={"tie": True}), folder=planned
    )
    unknown = slower.model_copy(update={"regret_ratio": None})
    assert "first choice   did not run" in verified_text(unknown, folder=planned)


# Seconds: only a process of its own can have a disk of its own.
def test_a_plan_on_a_read_only_disk_is_exit_code_3(planned: Path) -> None:
    own_mounts = ["unshare", "--mount", "--", "bash", "-c"]
    mounting = f"mount --bind {planned} {planned} && mount -o remount,bind,ro {planned}"
    if (
        shutil.which("unshare") is None
        or subprocess.run([*own_mounts, mounting], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs root and a kernel that lets it mount")
    started = f"{mounting} && exec {sys.executable} -m tuner verify {planned}"
    done = subprocess.run([*own_mounts, started], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line == f"moetune: cannot write '{planned / TRIALS_NAME}': Read-only file system"
    assert not (planned / TRIALS_NAME).exists()


@each_row(
    ("options", "line"),
    [
        (["--trials", "0"], "moetune: Invalid value for '--trials'"),
        (["--steps", "1"], "moetune: Invalid value for '--steps'"),
        (["--launcher", "carrier-pigeon"], "moetune: Invalid value for '--launcher'"),
        (["--storage", "sqlite:///a.db"], "moetune: --storage of kind 'sqlite': a study is shared"),
        (["--faults", "a.yaml"], "moetune: --faults a.yaml: verify makes no runs fail any more"),
        (["--repeats", "2"], "moetune: --repeats 2: ties are reported and not launched again"),
        (
            ["--network", "host"],
            "moetune: --network host: trials share this machine's network",
        ),
        (["--storage", "study.journal"], "moetune: --storage of kind 'file': a study is shared"),
    ],
)
def test_a_wrong_option_is_one_line(
    planned: Path, capsys: Captured, options: list[str], line: str
) -> None:
    assert frame.run(["verify", str(planned), *options]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(line)
    assert len(printed.err.splitlines()) == 1


def test_help_lists_every_option(capsys: Captured) -> None:
    text = output(capsys, ["verify", "--help"])
    for option in ("--trials", "--steps", "--launcher", "--resume", "--storage", "--json"):
        assert option in text
    for group in ("Options:", "Budget:", "Launchers:", "Resume and parallel workers:"):
        assert f"\n{group}\n" in text


@pytest.mark.slow
def test_real_launches_measure_and_leave_a_verified_plan(planned: Path, capsys: Captured) -> None:
    result = Verified.model_validate(
        json.loads(output(capsys, ["verify", planned, "--trials", "2", "--steps", "3", "--json"]))
    )
    assert [trial.status for trial in result.trials] == ["ok", "ok"]
    assert all(len(trial.measured_activation_bytes) for trial in result.trials)
    assert present(result.accuracy.activation_max_ape) < 0.05
    assert "NOT VERIFIED" not in (planned / "launch/reference/run.sh").read_text()
