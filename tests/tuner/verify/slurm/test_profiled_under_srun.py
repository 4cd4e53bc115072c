"""`srun moetune profile` on a real Slurm: ranks agree, one writes, and whatever ends it is told."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from profilers.links.matrix import links_of
from profilers.store import read_profile

if TYPE_CHECKING:
    from tests.tuner.slurm_cluster import Cluster
else:
    Cluster = Any

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextmanager
def _profiling(
    cluster: Cluster, out: Path, *, ranks: int, budget: str
) -> "Iterator[subprocess.Popen[str]]":
    # Where the ranks meet and through which card is for moetune to find out.
    left_out = {"MASTER_ADDR", "GLOO_SOCKET_IFNAME"}
    environment = {k: v for k, v in cluster.environment.items() if k not in left_out}
    command = (sys.executable, "-m", "tuner", "profile", "-o", str(out), "--suite", "links")
    with subprocess.Popen(
        ["srun", "-N2", f"-n{ranks}", "--overcommit", *command, "--budget", budget],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _ranks(out: Path) -> dict[int, int]:
    """Process ids by rank of those who measure into a folder."""
    result = {}
    for process in psutil.process_iter():
        try:
            if str(out) in process.cmdline() and "srun" not in process.name():
                result[int(process.environ()["SLURM_PROCID"])] = process.pid
        except (psutil.Error, KeyError):
            continue
    return result


def _measured(cluster: Cluster, table: Path, process: "subprocess.Popen[str]") -> None:
    cluster.wait_for(lambda: table.exists() or process.poll() is not None, what=table.name)
    assert process.poll() is None, process.communicate()


def _nothing_is_left(cluster: Cluster, out: Path) -> None:
    cluster.wait_for(lambda: not cluster.jobs(), what="the queue to be empty", limit_s=60.0)
    cluster.wait_for(lambda: not _ranks(out), what="the ranks to be gone", limit_s=60.0)


@pytest.mark.parametrize("per_node", [1, 2])
def test_ranks_of_two_nodes_agree_and_every_ranks_numbers_are_kept(
    cluster: Cluster, tmp_path: Path, per_node: int
) -> None:
    out, world = tmp_path / "profile", 2 * per_node
    with _profiling(cluster, out, ranks=world, budget=f"{20 * per_node}s") as process:
        said, complained = process.communicate(timeout=300.0)
    assert (process.returncode, complained) == (0, ""), complained
    # One rank tells and writes.
    assert said.count(f"{world} ranks, measured") == 1
    profile = read_profile(out)
    machine = profile.header.machine
    assert machine.hosts == ("n1",) * per_node + ("n2",) * per_node
    assert (machine.nodes, machine.ranks_per_node, machine.world) == (2, per_node, world)
    assert all(info.complete for info in profile.header.tables.values())
    assert {row.rank for row in profile.rows("every_rank")} == set(range(world))
    between = {
        (link.sender, link.receiver)
        for link in links_of(profile)
        if not link.is_inside and link.lanes == 1
    }
    assert between == {(0, per_node), (per_node, 0)}
    _nothing_is_left(cluster, out)


def test_a_rank_that_is_killed_is_named_by_its_node_and_what_was_measured_is_kept(
    cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "profile"
    with _profiling(cluster, out, ranks=2, budget="120s") as process:
        _measured(cluster, out / "link.parquet", process)
        os.kill(_ranks(out)[1], signal.SIGKILL)
        _, complained = process.communicate(timeout=60.0)
    assert process.returncode != 0
    # srun names the rank, and moetune says what the others do.
    parts = ("n2: task 1: Killed", "moetune: lost its peers: ")
    assert all(part in complained for part in parts), complained
    assert f"what was measured is kept in {out}" in complained
    profile = read_profile(out, with_incomplete=True)
    assert profile.header.tables["link"].complete
    assert {row.rank for row in profile.rows("every_rank")} == {0, 1}
    _nothing_is_left(cluster, out)


def test_a_job_that_is_cancelled_leaves_what_it_has_measured_and_no_process(
    cluster: Cluster, tmp_path: Path
) -> None:
    out = tmp_path / "profile"
    with _profiling(cluster, out, ranks=2, budget="120s") as process:
        _measured(cluster, out / "collective.parquet", process)
        (job,) = cluster.jobs()
        cluster.ask("scancel", job)
        _, complained = process.communicate(timeout=60.0)
    assert process.returncode != 0
    assert "CANCELLED" in complained
    assert "Traceback" not in complained
    profile = read_profile(out, with_incomplete=True)
    assert profile.header.tables["link"].complete
    assert profile.rows("collective")
    _nothing_is_left(cluster, out)
