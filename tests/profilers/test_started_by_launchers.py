"""Ranks that mpirun and torchrun start measure as one, and end together."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from profilers.links.matrix import links_of
from profilers.store import read_profile
from tests.patience import patient_s

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2")
MPICH = ("mpiexec.hydra", "-n", "2")
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
    *("--nproc-per-node", "2", "--no-python"),
)
LAUNCHERS = {"Open MPI": OPEN_MPI, "MPICH": MPICH, "torchrun": TORCHRUN}


def _start(launcher: Sequence[str], out: Path, *, budget: str) -> "subprocess.Popen[str]":
    if shutil.which(launcher[0]) is None:
        pytest.skip(f"needs {launcher[0]}: apt-get install openmpi-bin mpich")
    # torchrun leaves its folders.
    scratch = out.parent / "scratch"
    scratch.mkdir()
    command = (sys.executable, "-m", "tuner", "profile", "-o", str(out), "--suite", "links")
    return subprocess.Popen(
        [*launcher, *command, "--budget", budget],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)},
        start_new_session=True,
    )


def _ranks(out: Path, variable: str) -> dict[str, int]:
    """Process ids of those who measure into a folder, by what a variable of theirs says."""
    found = {}
    for process in psutil.process_iter():
        try:
            if str(out) in process.cmdline() and variable in process.environ():
                found[process.environ()[variable]] = process.pid
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize("name", LAUNCHERS)
def test_two_ranks_of_a_launcher_measure_as_one(name: str, tmp_path: Path) -> None:
    out = tmp_path / "profile"
    with _start(LAUNCHERS[name], out, budget="15s") as process:
        said, complained = process.communicate(timeout=patient_s(200.0))
    assert process.returncode == 0, complained
    assert said.count("2 ranks, measured") == 1
    profile = read_profile(out)
    assert (profile.header.machine.world, profile.header.machine.ranks_per_node) == (2, 2)
    # Open MPI binds each rank to a core of its own: two ranks on two cores are not too many.
    assert profile.header.machine.cores == len(os.sched_getaffinity(0))
    assert {row.rank for row in profile.rows("every_rank")} == {0, 1}
    assert {(link.sender, link.receiver) for link in links_of(profile)} == {(0, 1), (1, 0)}


@pytest.mark.parametrize(
    ("name", "variable"), [("torchrun", "RANK"), ("Open MPI", "OMPI_COMM_WORLD_RANK")]
)
def test_when_a_rank_is_killed_the_launcher_says_so_and_what_was_measured_is_kept(
    name: str, variable: str, tmp_path: Path
) -> None:
    out = tmp_path / "profile"
    with _start(LAUNCHERS[name], out, budget="120s") as process:
        while not (out / "link.parquet").exists() and process.poll() is None:
            time.sleep(0.1)
        os.kill(_ranks(out, variable)["1"], signal.SIGKILL)
        _, complained = process.communicate(timeout=patient_s(100.0))
    assert process.returncode != 0
    assert "rank 1" in complained or "rank      : 1" in complained
    profile = read_profile(out, with_incomplete=True)
    assert {row.rank for row in profile.rows("every_rank")} == {0, 1}
    assert profile.header.tables["link"].complete
    assert not _ranks(out, variable)
