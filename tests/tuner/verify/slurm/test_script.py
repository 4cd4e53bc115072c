"""The scripts of a job, run by bash with programs of the test in the place of Slurm's."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rows import each_row
from tuner.engines.launchers.shape import LaunchShape
from tuner.verify.slurm.options import parse_options
from tuner.verify.slurm.script import (
    ABANDONED_EXIT,
    EXIT_NAME,
    JOB_NAME,
    LEASE_NAME,
    LOST_NODE_EXIT,
    MOST_RESTARTS,
    NODE_NAME,
    RUN_NAME,
    job_script,
    node_script,
)

Done = subprocess.CompletedProcess[str]

TWO = LaunchShape(nodes=2, devices_per_node=1, device_kind="cpu")
ONE = LaunchShape(nodes=1, devices_per_node=1, device_kind="cpu")


def _program(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(f"#!/bin/bash\n{text}\n")
    file.chmod(0o755)
    return file


def _job(folder: Path, shape: LaunchShape = TWO, *, options: tuple[str, ...] = ()) -> str:
    return job_script(
        name="moetune-1",
        folder=folder,
        shape=shape,
        options=parse_options(options),
        limit_s=150.0,
        restarts=MOST_RESTARTS,
    )


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Done]:
    """Run the batch script: job(srun, restarts=0), srun being what runs on the nodes."""
    folder = tmp_path / "it's a trial"
    folder.mkdir()
    (folder / JOB_NAME).write_text(_job(folder))
    programs = tmp_path / "programs"
    programs.mkdir()
    _program(programs, "squeue", "echo moetune-1")
    _program(programs, "scontrol", f'echo "$@" >> {programs}/asked')
    _program(programs, "sleep", "exit 0")

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


def _left(tmp_path: Path, name: str) -> str:
    file = tmp_path / "it's a trial" / name
    return file.read_text().strip() if file.exists() else ""


def _scontrol_calls(tmp_path: Path) -> str:
    file = tmp_path / "programs" / "asked"
    return file.read_text().strip() if file.exists() else ""


@each_row("code", [0, 2, 77])
def test_a_run_leaves_its_exit_code_and_its_number(
    job: Callable[..., Done], tmp_path: Path, code: int
) -> None:
    done = job(f'[[ "$*" == *true ]] || exit {code}', restarts=2)
    assert (done.returncode, done.stderr) == (code, "")
    assert _left(tmp_path, EXIT_NAME) == str(code)
    assert _left(tmp_path, RUN_NAME) == "moetune-1.41.2"
    assert not _scontrol_calls(tmp_path)


def test_a_job_whose_nodes_cannot_be_reached_is_queued_again_in_bounds(
    job: Callable[..., Done], tmp_path: Path
) -> None:
    done = job("exit 1", restarts=2)
    assert "cannot be reached" in done.stderr
    assert _scontrol_calls(tmp_path) == "requeue 41"
    assert done.returncode == LOST_NODE_EXIT
    assert job("exit 1", restarts=3).returncode == LOST_NODE_EXIT
    assert _scontrol_calls(tmp_path) == "requeue 41"


def test_a_job_with_our_id_and_another_name_is_not_queued_again(
    job: Callable[..., Done], tmp_path: Path
) -> None:
    _program(tmp_path / "programs", "squeue", "echo somebody-elses")
    assert job("exit 1").returncode == LOST_NODE_EXIT
    assert not _scontrol_calls(tmp_path)


def test_a_former_run_of_a_job_leaves_nothing(job: Callable[..., Done], tmp_path: Path) -> None:
    job(f"echo moetune-1.41.9 > {RUN_NAME}")
    assert _left(tmp_path, EXIT_NAME) == ""


def test_the_shape_and_the_users_options_are_in_the_script(tmp_path: Path) -> None:
    lines = _job(tmp_path, options=("partition=gpu", "time=00:30:00", "gres=gpu:a:1")).splitlines()
    for line in (
        "--job-name=moetune-1",
        "--nodes=2",
        "--cpus-per-task=1",
        "--partition=gpu",
        "--time=00:30:00",
        "--requeue",
    ):
        assert f"#SBATCH {line}" in lines
    assert sum("--time=" in line for line in lines) == 1
    accelerated = LaunchShape(nodes=2, devices_per_node=8, device_kind="cuda")
    assert "#SBATCH --gpus-per-node=8" in _job(tmp_path, accelerated)
    assert "--gpus-per-node" not in _job(tmp_path, accelerated, options=("gres=gpu:8",))


def test_nodes_meet_at_the_first_one(tmp_path: Path) -> None:
    text = node_script(shape=TWO, deadline_s=60.0, lease_s=300.0)
    assert '--node-rank="$SLURM_NODEID" --rdzv-backend=static' in text
    assert "--nnodes=2 --nproc-per-node=1" in text
    assert "--deadline=63" in text
    single = node_script(shape=ONE, deadline_s=60.0, lease_s=300.0)
    assert "torch.distributed.run" not in single
    assert "profilers.local_ranks" not in single


def test_ranks_of_one_node_meet_through_a_file() -> None:
    shape = LaunchShape(nodes=1, devices_per_node=2, device_kind="cpu")
    text = node_script(shape=shape, deadline_s=60.0, lease_s=300.0)
    assert "-P -m profilers.local_ranks --ranks=2 profilers.steps step.json" in text
    assert "torch.distributed.run" not in text


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run the script of a node with another program in the place of Python: node(text)."""

    def ran(text: str, *, lease_s: float = 300.0, run: str = "moetune-1.41.0") -> Done:
        monkeypatch.setattr(sys, "executable", str(_program(tmp_path, "python", text)))
        (tmp_path / NODE_NAME).write_text(node_script(shape=ONE, deadline_s=60.0, lease_s=lease_s))
        (tmp_path / RUN_NAME).write_text(run)
        (tmp_path / LEASE_NAME).write_text("1")
        return subprocess.run(
            ["bash", NODE_NAME],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "41", "SLURM_JOB_NAME": "moetune-1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    return ran


@each_row("code", [0, 77])
def test_a_node_ends_as_its_ranks_do(node: Callable[..., Done], code: int) -> None:
    assert node(f"exit {code}").returncode == code


def test_ranks_that_nobody_waits_for_are_ended(node: Callable[..., Done]) -> None:
    done = node("exec sleep 600", lease_s=1.0)
    assert done.returncode == ABANDONED_EXIT
    assert "nobody waits for this trial any more" in done.stderr


def test_ranks_of_a_former_run_are_ended(node: Callable[..., Done]) -> None:
    done = node("exec sleep 600", run="moetune-1.41.1")
    assert (done.returncode, done.stderr) == (ABANDONED_EXIT, "")


def test_ranks_whose_lease_is_renewed_go_on(node: Callable[..., Done], tmp_path: Path) -> None:
    renewing = (
        f"for i in 1 2 3 4 5 6 7 8 9 10 11 12; do echo $RANDOM.$i > {tmp_path / LEASE_NAME};"
        " sleep 0.5; done"
    )
    assert node(renewing, lease_s=4.0).returncode == 0
