"""Links between emulated nodes are measured as they were set, and the slow node is named."""

import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profilers.links.matrix import MeasuredLink, links_of
from profilers.records import Profile
from profilers.store import read_profile
from profilers.stragglers import stragglers
from tests.expect import contains

GIGABIT_BYTES_PER_S = 1.25e8
DELAY_S = 1e-3
PROFILE = (
    "import sys\n"
    "from pathlib import Path\n"
    "from profilers.errors import ProfilerError\n"
    "from profilers.session import measure_profile\n"
    "try:\n"
    "    measure_profile(Path(sys.argv[1]), suites=('links',), budget_s=float(sys.argv[2]),\n"
    "                    device='cpu')\n"
    "except ProfilerError as error:\n"
    "    sys.exit(f'moetune: {error}')\n"
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _profiled(
    cluster: Any, out: Path, *, ranks_per_node: int = 1, budget_s: float = 45.0
) -> Profile:
    command = (sys.executable, "-P", "-c", PROFILE, str(out), str(budget_s))
    for ended in cluster.run(command, ranks_per_node=ranks_per_node):
        assert ended.returncode == 0, ended.stderr[-2000:]
    return read_profile(out)


def _between(profile: Profile) -> list[MeasuredLink]:
    return [link for link in links_of(profile) if not link.is_inside and link.lanes == 1]


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 2), (4, 1)])
def test_bandwidth_and_latency_are_those_that_were_set(
    emulated_cluster: Callable[..., Any], tmp_path: Path, nodes: int, ranks_per_node: int
) -> None:
    cluster = emulated_cluster(nodes=nodes, rate="1gbit", delay_s=DELAY_S)
    profile = _profiled(cluster, tmp_path / "profile", ranks_per_node=ranks_per_node)
    links = _between(profile)
    assert len(links) == nodes * (nodes - 1)
    rates = [link.bytes_per_s for link in links]
    latencies = [link.latency_s for link in links if link.latency_s is not None]
    assert statistics.median(rates) == pytest.approx(GIGABIT_BYTES_PER_S, rel=0.15)
    assert statistics.median(latencies) == pytest.approx(DELAY_S, rel=0.20)
    inside = [link.bytes_per_s for link in links_of(profile) if link.is_inside]
    if ranks_per_node > 1:
        assert min(inside) > 3.0 * max(rates)
    assert [one for one in stragglers(profile) if one.what == "node"] == []


def test_a_node_that_sends_at_a_fifth_is_named(
    emulated_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    cluster = emulated_cluster(nodes=4, rate="1gbit", delay_s=DELAY_S)
    cluster.shape(2, rate="200mbit")
    profile = _profiled(cluster, tmp_path / "profile")
    (found,) = [one for one in stragglers(profile) if one.what == "node"]
    assert "node 2" in found.where
    assert found.doing == "sending"
    assert 2.0 < found.ratio < 7.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_is_named_and_the_measured_tables_stay(
    emulated_cluster: Callable[..., Any], tmp_path: Path, number: signal.Signals
) -> None:
    cluster = emulated_cluster(nodes=3, rate="1gbit", delay_s=0.0)
    out = tmp_path / "profile"
    # The last rank ends or stops itself once the table of peers is on disk.
    script = (
        "import os, threading, time\n"
        "def leave():\n"
        f"    while not os.path.exists({str(out / 'link.parquet')!r}):\n"
        "        time.sleep(0.2)\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "if os.environ['RANK'] == '2':\n"
        "    threading.Thread(target=leave, daemon=True).start()\n"
    ) + PROFILE
    command = (sys.executable, "-P", "-c", script, str(out), "60")
    first, second, _ = cluster.run_all_but(2, command)
    assert first.returncode != 0
    assert second.returncode != 0
    contains(first.stderr, "rank 2 on", "died or was cut off")
    profile = read_profile(out)
    assert profile.header.tables["every_rank"].complete
    assert len(links_of(profile)) == 6
