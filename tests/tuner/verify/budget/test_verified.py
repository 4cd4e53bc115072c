"""The whole loop under a budget, with a launcher that answers from a hidden machine."""

import itertools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.expect import contains, present
from tests.printed import flat
from tests.rows import each_row
from tests.tuner.cli.refusals import refusal
from tests.tuner.verify.testing import FakeLauncher, Launcher
from tuner import api
from tuner.cli.plan_text import verified_text
from tuner.errors import SpecError
from tuner.goals.train_folder import read_plan, write_plan
from tuner.plans.folder import TRIALS_NAME
from tuner.report.content import Evidence
from tuner.report.markdown import markdown
from tuner.report.train_page import train_report
from tuner.verify.budget.budget import Budget
from tuner.verify.launcher import Launch, LaunchResult
from tuner.verify.records import TrialRecord, Verified, read_trials
from tuner.verify.verification import Effort, Watcher

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="session")
def eight_plan(
    tmp_path_factory: pytest.TempPathFactory,
    write_spec: Callable[..., Path],
    profile_for: Callable[[Path], Any],
    store_profile: Callable[[Path, Any], Path],
) -> Path:
    """The folder of a plan of eight layers on eight devices; read only, see `eight`."""
    folder = tmp_path_factory.mktemp("eight")
    search = {
        "tensor_model_parallel_size": [1],
        "virtual_pipeline_model_parallel_size": [1],
        "micro_batch_size": [2],
        "expert_model_parallel_size": [2],
        "dispatcher": ["alltoall"],
    }
    path = write_spec(
        folder,
        model={"num_hidden_layers": 8},
        pool={"devices_per_node": 4, "nodes": 2},
        goal={"global_batch_size": 32},
        search=search,
        emit=("reference", "megatron-lm", "slurm"),
    )
    store_profile(folder / "profile", profile_for(path))
    made = api.plan(path, top=4)
    write_plan(folder / "plan", made.plan, spec=made.spec, profiles=made.profiles)
    return folder / "plan"


@pytest.fixture
def eight(eight_plan: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    return Path(shutil.copytree(eight_plan, tmp_path / "plan"))


@pytest.fixture(scope="module")
def small_jobs(
    eight_plan: Path, tmp_path_factory: pytest.TempPathFactory, hidden_launcher: Launcher
) -> tuple[Path, Verified]:
    """What a verification by jobs of four devices has found, and its folder; read only."""
    folder = Path(shutil.copytree(eight_plan, tmp_path_factory.mktemp("small") / "plan"))
    launcher = hidden_launcher(folder, computation=1.5, communication=0.6, noise_ratio=0.02)
    result = _verified(folder, launcher, Budget(max_devices=4))
    records = read_trials(folder / TRIALS_NAME)
    assert [one.scale.decision for one in records if one.scale] == launcher.launched
    return folder, result


def _verified(
    folder: Path, launcher: FakeLauncher, budget: Budget | None, **options: Any
) -> Verified:
    ticks = itertools.count()
    effort = Effort(
        trials=options.pop("trials", 6),
        steps=5,
        parallel=options.pop("parallel", 1),
    )
    return api.verify(
        folder,
        effort=effort,
        resume=options.pop("resume", False),
        watcher=Watcher(started=lambda _decision, _seconds: None, ended=lambda _record: None),
        launch=launcher,
        budget=budget,
        clock=options.pop("clock", lambda: float(next(ticks))),
        **options,
    )


def test_smaller_jobs_are_launched_recorded_and_extrapolated(
    small_jobs: tuple[Path, Verified],
) -> None:
    folder, result = small_jobs
    assert result.trials
    plan = read_plan(folder)
    for trial in result.trials:
        assert present(trial.scale).num_devices <= 4 < trial.decision.num_devices == 8
        assert trial.measured_step_s is not None
        # What is extrapolated is the whole job's step, and the band is around it.
        whole = present(trial.extrapolated)
        low_s, high_s = whole.step_time_s_band
        assert low_s < whole.step_time_s < high_s
        assert whole.error_ratio < 0.6
    assert result.winner in [plan.decision, *(one.decision for one in plan.runners_up)]
    assert result.winner_step_s == present(result.winner_extrapolated).step_time_s
    assert result.accuracy.activation_max_ape == 0.0
    for record in read_trials(folder / TRIALS_NAME):
        assert TrialRecord.model_validate_json(record.model_dump_json()) == record


def test_files_text_and_report_are_of_the_whole_job_and_say_it_was_not_launched(
    small_jobs: tuple[Path, Verified],
) -> None:
    folder, result = small_jobs
    args = (folder / "launch" / "megatron-lm" / "megatron_args.txt").read_text()
    contains(args, "--num-layers 8", "this configuration was not among them")
    contains(
        flat(verified_text(result, folder=folder)),
        ", on 4 of 8 devices",
        "extrapolated tp",
        " ± ",
        " (90 % error band), from 4 of 8 devices",
        "%, extrapolated first choice ",
    )
    evidence = Evidence(verified=result, trials=read_trials(folder / TRIALS_NAME))
    report = markdown(train_report(read_plan(folder), evidence))
    assert "extrapolated from smaller jobs; no job of its own size was launched" in report


def test_a_budget_of_everything_is_as_good_as_none(
    eight: Path, tmp_path: Path, hidden_launcher: Launcher
) -> None:
    other = Path(shutil.copytree(eight, tmp_path / "other"))
    roomy = Budget(wall_s=1e7, max_devices=8)
    with_budget = _verified(eight, hidden_launcher(eight, noise_ratio=0.02), roomy, trials=3)
    without = _verified(other, hidden_launcher(other, noise_ratio=0.02), None, trials=3)
    assert with_budget == without


def test_going_on_without_a_budget_counts_what_smaller_jobs_said(
    eight: Path, hidden_launcher: Launcher
) -> None:
    before = _verified(eight, hidden_launcher(eight), Budget(max_devices=4), trials=2)
    assert all(trial.scale is not None for trial in before.trials)
    after = _verified(eight, hidden_launcher(eight), None, trials=4, resume=True)
    assert after.trials[:2] != ()
    assert [trial.scale is None for trial in after.trials] == [False, False, True, True]
    # The plan's own choice runs whole now, although a smaller job of it ran before.
    assert after.trials[2].decision == read_plan(eight).decision
    assert after.trials[2].extrapolated is None


@each_row("devices", [8, 4])
def test_what_failed_is_launched_again_only_while_there_is_time(
    eight: Path, tmp_path: Path, hidden_launcher: Launcher, devices: int
) -> None:
    folder = Path(shutil.copytree(eight, tmp_path / str(devices)))
    broken = hidden_launcher(folder, otherwise="crashed")
    late, mended = hidden_launcher(folder), hidden_launcher(folder)
    _verified(folder, broken, Budget(max_devices=devices))
    assert len(broken.launched) == 2
    _verified(folder, late, Budget(max_devices=devices, wall_s=1.0), resume=True)
    assert not late.launched
    _verified(folder, mended, Budget(max_devices=devices), resume=True, trials=3)
    assert mended.launched[:2] == broken.launched


def test_what_failed_waits_for_devices_that_are_busy(
    eight: Path, hidden_launcher: Launcher
) -> None:
    _verified(eight, hidden_launcher(eight, otherwise="crashed"), Budget(max_devices=8))
    mended, busy, most_busy = hidden_launcher(eight), 0, 0

    def run(launch: Launch) -> LaunchResult:
        nonlocal busy, most_busy
        busy += launch.decision.num_devices
        most_busy = max(most_busy, busy)
        time.sleep(0.5)
        busy -= launch.decision.num_devices
        return mended(launch)

    _verified(eight, run, Budget(max_devices=8), trials=4, parallel=2, resume=True)  # type: ignore[arg-type] # a function launches as well
    assert len(mended.launched) == 4
    assert most_busy == 8


def test_a_trial_gets_no_more_time_than_the_budget_has_left(
    eight: Path, hidden_launcher: Launcher
) -> None:
    given: list[float] = []
    fake = hidden_launcher(eight)
    now = 0.0

    def clock() -> float:
        return now

    def run(launch: Launch) -> LaunchResult:
        nonlocal now
        given.append(launch.deadline_s)
        now += 10.0
        return fake(launch)

    _verified(eight, run, Budget(wall_s=40.0), clock=clock)  # type: ignore[arg-type] # a function launches as well
    assert given
    assert all(one <= 42.0 - 10.0 * place for place, one in enumerate(given))


def test_failed_smaller_jobs_are_told_like_any_other(
    eight: Path, hidden_launcher: Launcher
) -> None:
    launcher = hidden_launcher(eight, otherwise="out_of_memory")
    result = _verified(eight, launcher, Budget(max_devices=4), trials=3)
    assert result.winner is None
    assert [trial.status for trial in result.trials] == ["out_of_memory"] * 3
    assert all(trial.extrapolated is None for trial in result.trials)


def test_an_impossible_budget_is_one_line_and_exit_code_2(eight: Path, capsys: Captured) -> None:
    line = refusal(capsys, ["verify", eight, "--max-devices", "1"])
    assert line.startswith("moetune: --max-devices 1: no trial is small enough; give")
    assert line.endswith("; give --max-devices 2 or more")
    assert "the shortest trial is predicted to take up to" in refusal(
        capsys, ["verify", eight, "--budget", "1s"]
    )
    assert refusal(capsys, ["verify", eight, "--budget", "soon"]).startswith("moetune: --budget: ")
    assert not (eight / TRIALS_NAME).exists()


def test_a_plan_of_nothing_smaller_still_takes_whole_jobs(
    eight: Path, hidden_launcher: Launcher
) -> None:
    with pytest.raises(SpecError, match=r"--budget 1\.00 s"):
        _verified(eight, hidden_launcher(eight), Budget(wall_s=1.0))
    result = _verified(eight, hidden_launcher(eight), Budget(wall_s=1e7), trials=2)
    assert [trial.scale for trial in result.trials] == [None, None]
