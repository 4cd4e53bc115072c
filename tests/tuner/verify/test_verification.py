"""The whole loop over a stored plan, with a launcher that answers from a hidden machine."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.expect import present
from tests.rows import each_row
from tests.tuner.verify.testing import DecisionSpace, Launcher, Record, Verify
from tuner.config.train import TrainDecision
from tuner.errors import PlanUnreadableError
from tuner.goals.train_folder import read_plan
from tuner.plans.folder import TRIALS_NAME, VERIFIED_NAME
from tuner.verify.records import TrialRecord, Verified, read_trials
from tuner.verify.verification import conclude, verified_plan


def _times(folder: Path) -> dict[str, int]:
    """When each stored record was written, to see that none is written again."""
    return {file.name: file.stat().st_mtime_ns for file in (folder / TRIALS_NAME).glob("*.json")}


def _launched_ok(folder: Path) -> list[TrainDecision]:
    return [record.decision for record in read_trials(folder / TRIALS_NAME)]


def test_the_winner_is_the_fastest_measured_and_recalibration_helps(
    planned: Path, verify: Verify, hidden_launcher: Launcher
) -> None:
    launcher = hidden_launcher(planned, computation=1.4, communication=0.5, noise_ratio=0.01)
    result = verify(planned, launcher, trials=8)
    assert [trial.status for trial in result.trials] == ["ok"] * 8
    # No decision is launched twice, and each has a folder of its own, which goes.
    assert len(set(launcher.launched)) == len(set(launcher.folders)) == 8
    assert not any(folder.exists() for folder in launcher.folders)
    assert result.winner == min(launcher.launched, key=launcher.true_s)
    measured = [trial.measured_step_s for trial in result.trials if trial.measured_step_s]
    assert result.winner_step_s == min(measured)
    first = result.trials[0]
    assert first.decision == read_plan(planned).decision
    assert result.regret_ratio == pytest.approx(
        present(first.measured_step_s) / min(measured) - 1.0
    )
    accuracy = result.accuracy
    # The truth is a combination of the two factors, up to the noise and who is slowest.
    assert present(accuracy.recalibrated_median_ape) < 0.05 < present(accuracy.predicted_median_ape)
    assert accuracy.activation_max_ape == 0.0
    assert result.residual is not None
    assert result.residual.num_runs == 8
    # Shares of communication from 9 to 17 % tell which part was dearer, not by how much.
    assert result.residual.communication < result.residual.computation < 1.45
    assert result.residual.computation > 1.2
    assert result.residual.release == "0.fake"


def test_what_is_launched_is_the_winner_with_what_was_expected_of_it(
    planned: Path, space: DecisionSpace, verify: Verify, hidden_launcher: Launcher
) -> None:
    # Everything but one neighbour crashes, so the winner is not what the plan chose.
    neighbourhood = space(planned)
    result = verify(
        planned, hidden_launcher(planned, ends={1: "ok"}, otherwise="crashed"), trials=4
    )
    made = verified_plan(neighbourhood, result)
    assert made.decision == result.winner != made.plan.decision
    assert made.predicted == neighbourhood.predicted(made.decision)
    assert made.predicted != made.plan.predicted
    assert [trial.status for trial in made.trials] == [trial.status for trial in result.trials]
    assert not made.waived


def test_the_same_plan_and_machine_give_the_same_verification(
    bound_plan: Path, tmp_path: Path, verify: Verify, hidden_launcher: Launcher
) -> None:
    result = []
    for name in ("one", "two"):
        folder = Path(shutil.copytree(bound_plan, tmp_path / name))
        result.append(verify(folder, hidden_launcher(folder, noise_ratio=0.02), trials=6))
    assert result[0] == result[1]


def test_trials_that_fail_are_recorded_and_the_study_goes_on(
    planned: Path, verify: Verify, hidden_launcher: Launcher
) -> None:
    launcher = hidden_launcher(
        planned, ends={0: "timeout", 2: "crashed", 3: "out_of_memory"}, computation=1.0
    )
    result = verify(planned, launcher, trials=8)
    statuses = [trial.status for trial in result.trials]
    assert statuses == ["timeout", "ok", "crashed", "out_of_memory", *["ok"] * 4]
    for trial in result.trials:
        assert trial.reason == ("" if trial.status == "ok" else f"fake {trial.status}")
        assert (trial.measured_step_s is None) == (trial.status != "ok")
    assert result.winner in [trial.decision for trial in result.trials if trial.status == "ok"]
    # The first choice hung, so nothing can be said about its regret.
    assert result.regret_ratio is None
    assert not result.tie
    assert present(result.residual).num_runs == 5


def test_when_every_trial_fails_there_is_no_winner_and_it_is_written_down(
    planned: Path, space: DecisionSpace, verify: Verify, hidden_launcher: Launcher
) -> None:
    before = {file: file.read_bytes() for file in (planned / "launch").rglob("*") if file.is_file()}
    result = verify(planned, hidden_launcher(planned, otherwise="crashed"), trials=3)
    assert result.winner is None
    assert result.winner_step_s is None
    assert result.regret_ratio is None
    assert result.residual is None
    assert result.accuracy.rank_of_measured_best is None
    assert Verified.model_validate_json((planned / VERIFIED_NAME).read_bytes()) == result
    # The launch files stay what they were: not verified, and saying so.
    assert {file: file.read_bytes() for file in before} == before
    with pytest.raises(ValueError, match="no trial ran"):
        verified_plan(space(planned), result)


@each_row("killed_at", [0, 3])
def test_ctrl_c_during_a_launch_loses_that_launch_only(
    bound_plan: Path, tmp_path: Path, verify: Verify, hidden_launcher: Launcher, killed_at: int
) -> None:
    planned = Path(shutil.copytree(bound_plan, tmp_path / str(killed_at)))
    killed = hidden_launcher(planned, interrupt_at=killed_at)
    with pytest.raises(KeyboardInterrupt):
        verify(planned, killed, trials=6)
    assert not (planned / VERIFIED_NAME).exists()
    assert _launched_ok(planned) == killed.launched[:killed_at]
    written = _times(planned)
    repeated = hidden_launcher(planned)
    result = verify(planned, repeated, trials=6, resume=True)
    assert len(result.trials) == 6
    assert not set(repeated.launched) & set(killed.launched[:killed_at])
    assert len(repeated.launched) == 6 - killed_at
    assert _times(planned).items() >= written.items()
    # The plan's own choice is among the trials, whatever was lost.
    assert result.regret_ratio is not None


def test_death_after_the_study_was_told_repeats_nothing(
    planned: Path, verify: Verify, hidden_launcher: Launcher
) -> None:
    def die(record: TrialRecord) -> None:
        raise KeyboardInterrupt

    killed = hidden_launcher(planned)
    with pytest.raises(KeyboardInterrupt):
        verify(planned, killed, trials=4, ended=die)
    assert len(_launched_ok(planned)) == 1
    repeated = hidden_launcher(planned)
    assert len(verify(planned, repeated, trials=4, resume=True).trials) == 4
    assert not set(repeated.launched) & set(killed.launched)


KILL_ME = """
import json, sys
from pathlib import Path
from tuner import api
from tuner.verify.launcher import LaunchResult
from tuner.verify.records import TrialRecord
from tuner.verify.verification import Effort, Watcher

folder, patient = Path(sys.argv[1]), int(sys.argv[2])
launches = 0

def launch(_launch):
    global launches
    launches += 1
    if launches > patient:
        print("hanging", flush=True)
        sys.stdin.read()
    return LaunchResult(status="crashed", reason=f"of no use {launches}", report=None, wall_s=0.0)

api.verify(
    folder, effort=Effort(trials=9, steps=3), resume=True, launch=launch,
    watcher=Watcher(started=lambda *_: None, ended=lambda _: None),
)
"""


@pytest.mark.slow
def test_a_killed_process_is_resumed_without_repeating_a_finished_trial(
    planned: Path, verify: Verify, hidden_launcher: Launcher, tmp_path: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", KILL_ME, str(planned), "2"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(scratch)},
    ) as process:
        assert present(process.stdout).readline() == "hanging\n"
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    finished = _launched_ok(planned)
    assert len(finished) == 2
    repeated = hidden_launcher(planned)
    result = verify(planned, repeated, trials=6, resume=True)
    assert [trial.decision for trial in result.trials] == [*finished, *repeated.launched]
    assert not set(repeated.launched) & set(finished)


def test_trials_that_exist_are_kept_and_a_full_count_launches_nothing(
    planned: Path, verify: Verify, hidden_launcher: Launcher
) -> None:
    first, idle = verify(planned, hidden_launcher(planned), trials=4), hidden_launcher(planned)
    written = _times(planned)
    with pytest.raises(PlanUnreadableError, match=r"holds 4 trials already: add --resume"):
        verify(planned, idle, trials=4)
    assert _times(planned) == written
    for trials in (4, 2):
        assert verify(planned, idle, trials=trials, resume=True) == first
    damaged = planned / TRIALS_NAME / "0000.json"
    damaged.write_text(damaged.read_text()[:100])
    with pytest.raises(PlanUnreadableError, match=r"0000\.json"):
        verify(planned, idle, trials=4, resume=True)
    # The way out that the line names.
    damaged.unlink()
    assert verify(planned, idle, trials=4, resume=True) == first
    assert not idle.launched


def _concluded(planned: Path, records: list[TrialRecord]) -> Verified:
    from tuner.costs.residuals import residual_for

    return conclude(
        read_plan(planned),
        records,
        prior=residual_for("reference", device="any", device_kind="cpu"),
    )


def _others(planned: Path) -> list[TrainDecision]:
    return [other.decision for other in read_plan(planned).runners_up]


def test_regret_and_rank_by_hand(planned: Path, record: Record) -> None:
    fast, middle = _others(planned)[:2]
    result = _concluded(
        planned,
        [
            record(0, measured_s=2.4, predicted_step_s=1.0, predicted_communication_s=0.1),
            record(1, measured_s=2.0, predicted_step_s=1.5, decision=fast),
            record(2, measured_s=2.2, predicted_step_s=1.2, decision=middle),
            record(3, measured_s=None, predicted_step_s=0.5, decision=_others(planned)[2]),
        ],
    )
    assert result.winner == fast
    assert result.winner_step_s == 2.0
    # 2.4 / 2.0 - 1.
    assert result.regret_ratio == pytest.approx(0.2)
    # Two that ran were predicted faster, 1.0 and 1.2; what never ran does not count.
    assert result.accuracy.rank_of_measured_best == 3
    # |1.0/2.4 - 1|, |1.5/2 - 1|, |1.2/2.2 - 1| = 0.583, 0.25, 0.4545.
    assert result.accuracy.predicted_median_ape == pytest.approx(1.0 / 2.2)


def test_a_difference_inside_the_noise_is_a_tie(planned: Path, record: Record) -> None:
    other = _others(planned)[0]
    # Quartiles of 1.9 2.0 2.0 2.0 2.1: 1.95 and 2.05, so the standard error of each median is
    # 1.2533 * 0.1 / 1.349 / sqrt(5) = 0.0415; a tie is within twice the sum of both.
    noisy = (1.9, 2.0, 2.0, 2.0, 2.1)
    first = record(0, measured_s=2.0, measured_steps_s=noisy)
    edge_s = 2 * 2 * 1.2533 * 0.1 / 1.349 / 5**0.5

    def winner(measured_s: float) -> TrialRecord:
        shifted = tuple(step + measured_s - 2.0 for step in noisy)
        return record(1, measured_s=measured_s, measured_steps_s=shifted, decision=other)

    assert _concluded(planned, [first, winner(2.0 - 0.95 * edge_s)]).tie
    assert not _concluded(planned, [first, winner(2.0 - 1.05 * edge_s)]).tie
    alone = _concluded(planned, [first])
    assert alone.regret_ratio == 0.0
    assert alone.tie


def test_launches_that_former_releases_repeated_count_together(
    planned: Path, record: Record
) -> None:
    other = _others(planned)[0]
    made = _concluded(
        planned,
        [
            record(0, measured_s=2.0),
            record(1, measured_s=2.2, decision=other),
            # The median of five steps of 2.0 s and of five of 2.6 s is 2.3 s.
            record(2, measured_s=2.6, origin="repeat"),
            # That of 2.2 s and 1.9 s is 2.05 s: the winner.
            record(3, measured_s=1.9, decision=other, origin="repeat"),
        ],
    )
    assert made.winner == other
    assert made.winner_step_s == pytest.approx(2.05)
    assert made.regret_ratio == pytest.approx(2.3 / 2.05 - 1.0)
    assert len(made.trials) == 4


def test_single_steps_have_no_noise_to_hide_in(planned: Path, record: Record) -> None:
    first = record(0, measured_s=2.0, measured_steps_s=(2.0,))
    winner = record(1, measured_s=1.999, measured_steps_s=(1.999,), decision=_others(planned)[0])
    assert not _concluded(planned, [first, winner]).tie


def test_activation_error_is_the_largest_over_trials_and_ranks(
    planned: Path, record: Record
) -> None:
    result = _concluded(
        planned,
        [
            record(0, predicted_activation_bytes=(1000,), measured_activation_bytes=(990,)),
            record(
                1,
                predicted_activation_bytes=(1000, 1000),
                measured_activation_bytes=(1000, 1040),
                decision=_others(planned)[0],
            ),
        ],
    )
    assert result.accuracy.activation_max_ape == pytest.approx(40 / 1040)
    assert result.trials[1].recalibrated_activation_bytes == (1000, 1000)
