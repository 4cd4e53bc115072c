"""Two trials that fail for one reason end the verification, and the reason is said once."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.expect import contains
from tests.tuner.verify.testing import Launcher, Verify
from tuner import api
from tuner.cli import app as frame
from tuner.cli.plan_text import verified_text
from tuner.cli.trials import trial_lines
from tuner.goals.train_folder import read_plan
from tuner.plans.folder import TRIALS_NAME
from tuner.verify.launcher import NODE_GONE, Launch, LaunchResult, timeout_result
from tuner.verify.loop import failure_cause, identical_failures, stop_notes
from tuner.verify.records import TrialRecord, read_trials
from tuner.verify.verification import Effort

Captured = pytest.CaptureFixture[str]


def one(number: int, status: str, reason: str = "") -> TrialRecord:
    """A trial that ended."""
    fields: dict[str, Any] = {"number": number, "status": status, "reason": reason}
    return TrialRecord.model_construct(origin="plan", **fields)


def ended(*statuses: tuple[str, str]) -> list[TrialRecord]:
    return [one(number, status, reason) for number, (status, reason) in enumerate(statuses)]


LACK = ("crashed", "ModuleNotFoundError: No module named 'megatron'")
OTHER = ("crashed", "RuntimeError: shapes 4 and 8 do not match")
OOM = ("out_of_memory", "rank 0 is out of memory")
RAN = ("ok", "")
HUNG = ("timeout", timeout_result(90.0, wall_s=90.0, steps=0).reason)
SLOW = ("timeout", timeout_result(90.0, wall_s=90.0, steps=3).reason)
LATE = ("timeout", "the budget was over while the job ran; it was ended")


def test_causes_are_compared_without_what_differs_from_launch_to_launch() -> None:
    alike = [
        (
            "exit code 127: /tmp/a/trials/0000/launch/run.sh: line 22: MEGATRON_LM: is needed",
            "exit code 127: /tmp/a/trials/0001/launch/run.sh: line 22: MEGATRON_LM: is needed",
        ),
        (
            "DistNetworkError: failed to listen on port:29501",
            "DistNetworkError: failed to listen on port:31777",
        ),
        ("2026-11-23 20:01:02,123 Error: at 0x7f00", "2026-11-23 20:05:09,001 Error: at 0x7f3a"),
        ("[rank3] Error: no device", "[rank0] Error: no device"),
    ]
    for first, other in alike:
        assert failure_cause(one(0, "crashed", first)) == failure_cause(one(1, "crashed", other))
    apart = [
        ("No module named 'megatron'", "No module named 'deep_ep'"),
        ("shapes 4 and 8 do not match", "shapes 2 and 8 do not match"),
        ("exit code 1", "exit code 127"),
    ]
    for first, other in apart:
        assert failure_cause(one(0, "crashed", first)) != failure_cause(one(1, "crashed", other))


def test_only_identical_failures_since_the_last_trial_that_ran_count() -> None:
    cases: list[tuple[Sequence[tuple[str, str]], int]] = [
        ([LACK], 0),
        ([LACK, LACK], 2),
        ([LACK, OTHER], 0),
        ([LACK, OTHER, LACK], 2),
        ([LACK, OOM, LACK], 2),
        ([LACK, RAN, LACK], 0),
        ([RAN, LACK, LACK], 2),
        ([OOM, OOM, OOM], 0),
        ([HUNG, ("timeout", timeout_result(120.0, wall_s=120.0, steps=0).reason)], 2),
        ([SLOW, SLOW], 0),
        ([LATE, LATE], 0),
        # What Slurm lost says nothing of further jobs.
        ([("crashed", NODE_GONE)] * 2, 0),
        ([("timeout", "no report when Slurm ended the job at its time limit")] * 2, 0),
    ]
    result = [len(identical_failures(ended(*statuses))) for statuses, _ in cases]
    assert result == [count for _, count in cases]


def test_failures_of_an_earlier_call_do_not_count() -> None:
    failed = ended(LACK, LACK, LACK, LACK)
    assert stop_notes(failed[:3], earlier={0, 1}, trials=8) == ()
    (line,) = stop_notes(failed, earlier={0, 1}, trials=8)
    assert line.startswith("stopped: 2 trials failed identically, so 4 of 8 were not launched")
    assert stop_notes(ended(LACK, LACK, RAN, RAN), earlier={0, 1}, trials=8) == ()


def test_two_identical_crashes_end_each_call_until_their_cause_is_mended(
    planned: Path, verify: Verify, hidden_launcher: Launcher
) -> None:
    broken, still, mended = (
        hidden_launcher(planned, otherwise=how) for how in ("crashed", "crashed", "ok")
    )
    result = verify(planned, broken, trials=8)
    assert result.winner is None
    assert broken.launched[0] == read_plan(planned).decision
    assert any(
        "2 trials failed identically, so 6 of 8 were not launched" in one for one in result.notes
    )
    text = verified_text(result, folder=planned)
    assert text.count("fake crashed") == 1
    assert "failed         2 trials crashed: fake crashed" in text
    assert verify(planned, still, trials=8, resume=True).winner is None
    # What failed is launched again first.
    result = verify(planned, mended, trials=8, resume=True)
    assert mended.launched[:2] == broken.launched == still.launched
    assert len(broken.launched) == 2
    assert len(mended.launched) == 8
    assert result.winner is not None
    # The plan's own choice was measured after all.
    assert result.regret_ratio is not None


def test_running_out_of_memory_ends_nothing(
    planned: Path, verify: Verify, hidden_launcher: Launcher
) -> None:
    launcher = hidden_launcher(planned, otherwise="out_of_memory")
    result = verify(planned, launcher, trials=6)
    assert len(launcher.launched) == 6
    assert not any("stopped" in note for note in result.notes)


def test_the_cause_is_told_once_while_trials_run(
    planned: Path, capsys: Captured, hidden_launcher: Launcher
) -> None:
    api.verify(
        planned,
        effort=Effort(trials=8, steps=5),
        resume=False,
        watcher=trial_lines(),
        launch=hidden_launcher(planned, otherwise="crashed"),
    )
    lines = capsys.readouterr().err
    assert lines.count("fake crashed") == 1
    assert ": crashed like trial 0: not measured" in lines


def test_a_reason_that_names_the_trial_folder_is_the_same_cause(
    planned: Path, hidden_launcher: Launcher, verify: Verify
) -> None:
    launched: list[Any] = []

    def crash(launch: Launch) -> LaunchResult:
        launched.append(launch)
        reason = f"exit code 127: {launch.folder}/run.sh: command not found"
        return LaunchResult(status="crashed", reason=reason, report=None, wall_s=0.1)

    verify(planned, crash, trials=8)
    assert len(launched) == 2


def test_a_real_command_that_lacks_a_module_is_launched_twice(
    planned: Path, capsys: Captured
) -> None:
    command = f"{sys.executable} -c 'import nowhere_to_be_found'"
    arguments = ["verify", str(planned), "--launcher", "command", "--command", command]
    assert frame.run(arguments) == 1
    printed = capsys.readouterr()
    assert len(read_trials(planned / TRIALS_NAME)) == 2
    cause = "ModuleNotFoundError: No module named 'nowhere_to_be_found'"
    assert printed.out.count(cause) == 1
    assert printed.err.count(cause) == 1
    contains(printed.out, "no trial ran: nothing is verified", "so 6 of 8 were not launched")
