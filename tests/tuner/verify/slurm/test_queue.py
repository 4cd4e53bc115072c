"""Slurm's answers, as scontrol(1) and sacct(1) describe them."""

import os
from pathlib import Path

import pytest

from tests.rows import each_row
from tuner.errors import EnvironmentMissingError, SchedulerError
from tuner.verify.slurm import queue
from tuner.verify.slurm.queue import JobState, SlurmAwayError, parse_sacct, parse_scontrol

LINE = (
    "JobId=7 JobName=moetune-1 UserId=a(1) JobState=RUNNING Reason=None Dependency=(null)"
    " Requeue=1 Restarts=2 BatchFlag=1 RunTime=1-02:03:04 TimeLimit=01:00:00 Command=/a b/job.sh"
)


def program(folder: Path, name: str, text: str) -> None:
    """Put a program into a folder."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose programs go before the machine's own."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    program(tmp_path, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    return tmp_path


def test_scontrol_tells_state_restarts_and_run_time() -> None:
    # 1 day, 2 h, 3 min and 4 s.
    expected = JobState(state="RUNNING", reason="None", run_s=93784.0, restarts=2, limit_s=3600.0)
    assert parse_scontrol(LINE, name="moetune-1") == expected
    assert expected.is_alive


def test_what_a_job_calls_itself_cannot_change_its_state() -> None:
    result = parse_scontrol(LINE + " Comment=x JobState=COMPLETED", name="moetune-1")
    assert result is not None
    assert result.state == "RUNNING"


@each_row("text", ["", "No jobs in the system", "slurm_load_jobs error"])
def test_another_answer_of_scontrol_is_none(text: str) -> None:
    assert parse_scontrol(text, name="moetune-1") is None


def test_sacct_tells_the_last_run_and_who_cancelled() -> None:
    cancelled = JobState(state="CANCELLED", run_s=65.0, limit_s=180.0)
    assert parse_sacct("a|CANCELLED by 1000|65|00:03:00\n", name="a") == cancelled
    repeated = JobState(state="COMPLETED", run_s=70.0)
    text = "a|NODE_FAIL|9|UNLIMITED\na|COMPLETED|70|UNLIMITED\n"
    assert parse_sacct(text, name="a") == repeated
    assert parse_sacct("\n", name="a") is None
    assert parse_sacct("garbage", name="a") is None


def test_an_id_that_was_given_to_another_job_is_not_ours() -> None:
    assert parse_scontrol(LINE, name="moetune-2") is None
    assert parse_sacct("moetune-1|RUNNING|9|", name="moetune-2") is None


def test_sacct_is_asked_where_scontrol_has_forgotten_the_job(path: Path) -> None:
    program(path, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert queue.job_state("7", name="a") is None
    program(path, "sacct", "echo 'a|FAILED|12|Partition_Limit'")
    assert queue.job_state("7", name="a") == JobState(state="FAILED", run_s=12.0)


def test_a_silent_controller_is_not_an_end_of_the_job(path: Path) -> None:
    program(
        path,
        "scontrol",
        "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
    )
    with pytest.raises(SlurmAwayError, match="Unable to contact"):
        queue.job_state("7", name="a")


@each_row(
    "said",
    [
        "sbatch: error: Batch job submission failed: Invalid account or account/partition",
        "sbatch: error: invalid partition specified: gpu",
        "sbatch: unrecognized option '--colour=red'",
    ],
)
def test_a_refused_job_is_one_line_for_the_user(path: Path, tmp_path: Path, said: str) -> None:
    program(path, "sbatch", f'echo "{said}" >&2; exit 1')
    with pytest.raises(SchedulerError, match="sbatch refuses the trial: "):
        queue.submit(tmp_path / "job.sh", output=tmp_path / "log", environment=os.environ)


def test_a_submission_without_an_answer_is_not_a_refusal(path: Path, tmp_path: Path) -> None:
    said = "sbatch: error: Batch job submission failed: Unable to contact slurm controller"
    program(path, "sbatch", f'echo "{said}" >&2; exit 1')
    with pytest.raises(SlurmAwayError):
        queue.submit(tmp_path / "job.sh", output=tmp_path / "log", environment=os.environ)


def test_the_log_of_a_folder_with_a_percent_sign_is_no_pattern(path: Path, tmp_path: Path) -> None:
    program(path, "sbatch", f"printf '%s\\n' \"$@\" > {tmp_path}/asked; echo '12;cluster'")
    job = queue.submit(
        tmp_path / "job.sh", output=tmp_path / "50%j" / "log", environment=os.environ
    )
    assert job == "12"
    assert f"--output={tmp_path}/50%%j/log" in (tmp_path / "asked").read_text().splitlines()


def test_cancelling_what_has_ended_is_no_error(path: Path) -> None:
    program(path, "scancel", "echo 'scancel: error: Kill job error: Invalid job id' >&2; exit 1")
    queue.cancel("7", name="a")


def test_a_machine_without_slurm_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentMissingError, match="needs sbatch, which is not on the path"):
        queue.check_programs()
