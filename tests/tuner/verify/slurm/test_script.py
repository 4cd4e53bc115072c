"""The scripts of a job, run by bash with programs of the test in the place of Slurm's."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.expect import contains
from tests.rows import each_row
from tuner.engines.launchers.shape import LaunchShape
from tuner.verify.slurm import (
    DEADLINE_EXIT,
    JOB_NAME,
    LOST_NODE_EXIT,
    MOST_RESTARTS,
    RESTARTED,
    STARTED_NAME,
    job_script,
)

Done = subprocess.CompletedProcess[str]

TWO = LaunchShape(nodes=2, devices_per_node=1, device_kind="cpu")
ONE = LaunchShape(nodes=1, devices_per_node=1, device_kind="cpu")


def _program(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)
    return file


def _job(folder: Path, shape: LaunchShape = TWO, *, limit_s: float = 150.0) -> str:
    return job_script(folder=folder, shape=shape, deadline_s=limit_s, restarts=MOST_RESTARTS)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Done]:
    """Run the batch script: job(srun, restarts=0), srun being what runs on the nodes."""
    folder = tmp_path / "it's a trial"
    folder.mkdir()
    (folder / JOB_NAME).write_text(_job(folder))
    programs = tmp_path / "programs"
    programs.mkdir()
    _program(programs, "scontrol", f'echo "$@" >> {programs}/asked')
    _program(programs, "sleep", '[[ "$1" == 60 ]] || exec /bin/sleep "$@"')

    def ran(srun: str, *, restarts: int = 0) -> Done:
        _program(programs, "srun", srun)
        environment = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_ID": "41",
            "SLURM_JOB_NAME": "moetune-1",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        return subprocess.run(
            ["bash", str(folder / JOB_NAME)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return ran


def _scontrol_calls(tmp_path: Path) -> str:
    file = tmp_path / "programs" / "asked"
    return file.read_text().strip() if file.exists() else ""


@each_row("code", [0, 2, 77, DEADLINE_EXIT])
def test_a_job_ends_as_its_ranks_do(job: Callable[..., Done], tmp_path: Path, code: int) -> None:
    done = job(f'[[ "$*" == *true ]] || exit {code}', restarts=2)
    assert (done.returncode, done.stdout, done.stderr) == (code, f"{RESTARTED}\n", "")
    assert (tmp_path / "it's a trial" / STARTED_NAME).exists()
    assert not _scontrol_calls(tmp_path)


def test_a_job_whose_nodes_cannot_be_reached_is_queued_again_in_bounds(
    job: Callable[..., Done], tmp_path: Path
) -> None:
    done = job("exit 1", restarts=2)
    assert "cannot be reached" in done.stderr
    assert _scontrol_calls(tmp_path) == "requeue 41"
    assert done.returncode == LOST_NODE_EXIT
    assert job("exit 1", restarts=3).returncode == LOST_NODE_EXIT
    assert job("exit 0", restarts=4).returncode == LOST_NODE_EXIT
    assert _scontrol_calls(tmp_path) == "requeue 41"


def test_a_run_is_ended_at_its_deadline(job: Callable[..., Done], tmp_path: Path) -> None:
    folder = tmp_path / "it's a trial"
    (folder / JOB_NAME).write_text(_job(folder, limit_s=1.0))
    assert job("exec sleep 600").returncode == DEADLINE_EXIT


def test_a_job_whose_trial_has_gone_runs_nothing(job: Callable[..., Done], tmp_path: Path) -> None:
    ((tmp_path / "it's a trial") / JOB_NAME).write_text(_job(tmp_path / "gone"))
    assert job("exit 0").returncode == 1


def test_nodes_meet_at_the_first_one(tmp_path: Path) -> None:
    contains(
        _job(tmp_path, limit_s=60.0),
        '--node-rank="$SLURM_NODEID" --rdzv-backend=static',
        "--nnodes=2 --nproc-per-node=1",
        "timeout 60 srun",
        "--deadline=90",
    )
    single = _job(tmp_path, ONE)
    assert "torch.distributed.run" not in single
    assert "profilers.local_ranks" not in single


def test_ranks_of_one_node_meet_through_a_file(tmp_path: Path) -> None:
    text = _job(tmp_path, LaunchShape(nodes=1, devices_per_node=2, device_kind="cpu"))
    assert "-P -m profilers.local_ranks --ranks=2 profilers.steps step.json" in text
    assert "torch.distributed.run" not in text
