from pathlib import Path

import numpy as np
import pytest

from profilers.errors import ProfileUnreadableError
from profilers.imports.link_matrix import link_matrix_csv, read_link_matrix
from profilers.records import Case, Measurement
from profilers.store import write_profile
from tests.expect import refused
from tests.profilers.testing import fake_machine, fake_profile
from tests.rows import each_row


def run(folder: Path, hosts: tuple[str, ...], *, time_us: float, name: str = "sendrecv") -> None:
    ranks = "\n".join(
        f"#  Rank {rank:2d} Group  0 Pid {rank + 7} on {host} device  0 [0000:01:00] NVIDIA H100"
        for rank, host in enumerate(hosts)
    )
    (folder / f"{'-'.join(hosts)}.txt").write_text(
        f"# Collective test starting: {name}_perf\n{ranks}\n"
        f" 1000 250 float sum -1 {time_us:.2f} 0 0 0 {time_us:.2f} 0 0 0\n"
        f" 4000 1000 float sum -1 {2 * time_us:.2f} 0 0 0 {2 * time_us:.2f} 0 0 0\n"
    )


def test_every_pair_has_the_best_of_its_sizes(tmp_path: Path) -> None:
    run(tmp_path, ("a", "b"), time_us=1.0)
    run(tmp_path, ("c", "a"), time_us=2.0)
    run(tmp_path, ("b", "c"), time_us=4.0)
    found = read_link_matrix(tmp_path)
    assert found.nodes == ("a", "b", "c")
    # 4000 bytes in 2, 4 and 8 microseconds
    expected = [[np.inf, 2e9, 1e9], [2e9, np.inf, 5e8], [1e9, 5e8, np.inf]]
    assert found.bytes_per_s_NN.ravel() == pytest.approx(np.ravel(expected))


def test_half_of_an_all_to_all_crosses(tmp_path: Path) -> None:
    run(tmp_path, ("a", "a", "a", "a", "b", "b", "b", "b"), time_us=1.0, name="alltoall")
    # 4 ranks send 4000 bytes each, half of it to the other node, in 2 microseconds.
    assert read_link_matrix(tmp_path).bytes_per_s_NN[0, 1] == pytest.approx(4e9)


def test_a_pair_that_was_not_tested_is_named(tmp_path: Path) -> None:
    run(tmp_path, ("a", "b"), time_us=1.0)
    run(tmp_path, ("a", "c"), time_us=1.0)
    with pytest.raises(ProfileUnreadableError, match="no test of the nodes b and c"):
        read_link_matrix(tmp_path)


@each_row(
    ("hosts", "name", "complaint"),
    [
        (("a", "b", "c"), "sendrecv", "a test of a pair has two nodes with equal ranks"),
        (("a", "a", "b"), "alltoall", "a test of a pair has two nodes with equal ranks"),
        (("a", "a", "b", "b"), "sendrecv", "send_recv of 2 ranks per node says nothing"),
        (("a", "b"), "all_reduce", "all_reduce of 1 ranks per node says nothing"),
    ],
)
def test_a_run_that_is_no_test_of_a_pair_is_refused(
    tmp_path: Path, hosts: tuple[str, ...], name: str, complaint: str
) -> None:
    folder = tmp_path / f"{name}-{'-'.join(hosts)}"
    folder.mkdir()
    run(folder, hosts, time_us=1.0, name=name)
    with pytest.raises(ProfileUnreadableError, match=complaint):
        read_link_matrix(folder)


TABLE = "bytes_per_s,b,a\nb,,3e9\na,1e9,0\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "links.csv"
    path.write_text(text)
    return path


def test_a_table_is_read_in_its_own_order_and_back(tmp_path: Path) -> None:
    found = read_link_matrix(written(tmp_path, TABLE))
    assert found.nodes == ("b", "a")
    assert found.bytes_per_s_NN.tolist() == [[np.inf, 3e9], [1e9, np.inf]]
    again = read_link_matrix(written(tmp_path, link_matrix_csv(found)))
    assert again.nodes == found.nodes
    assert again.bytes_per_s_NN.tolist() == found.bytes_per_s_NN.tolist()


@each_row(
    ("text", "complaint"),
    [
        ("", "begins with ''; the first cell of a link matrix is 'bytes_per_s'"),
        ("Gbit/s,a,b\n", "begins with 'Gbit/s'"),
        ("bytes_per_s,a\na,1\n", "names 1 nodes; 2 to 2048 nodes"),
        ("bytes_per_s,a,a\n", "names 'a' twice"),
        ("bytes_per_s,a,b\na,,1e9\n", "node 'b' has a column and no row"),
        ("bytes_per_s,a,b\na,,1e9\nc,1e9,\n", "node 'c' has no column"),
        ("bytes_per_s,a,b\na,,1e9\na,,1e9\n", "node 'a' has two rows"),
        ("bytes_per_s,a,b\na,,1e9,1e9\nb,1e9,\n", "the row of node 'a' has 3 cells, there are 2"),
        ("bytes_per_s,a,b\na,,nan\nb,1e9,\n", "'nan' from node 'a' to 'b' is no bandwidth"),
        ("bytes_per_s,a,b\na,,1e9\nb,0,\n", "'0' from node 'b' to 'a' is no bandwidth"),
        ("bytes_per_s,a,b\na,,1e9\nb,1e-300,\n", "is no bandwidth; .* 1 to 1e\\+15"),
        ("bytes_per_s,a,b\na,,1e9\nb,1e300,\n", "'1e300' from node 'b' to 'a' is no bandwidth"),
        ("bytes_per_s,a,b\na,,1e9\nb,fast,\n", "'fast' from node 'b' to 'a' is no bandwidth"),
        ("bytes_per_s,a,$(b)\na,,1\n$(b),1,\n", r"'\$\(b\)' is no host name"),
    ],
)
def test_a_table_that_is_no_matrix_is_one_clear_line(
    tmp_path: Path, text: str, complaint: str
) -> None:
    with refused(ProfileUnreadableError, match=complaint):
        read_link_matrix(written(tmp_path, text))


def test_a_path_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ProfileUnreadableError, match="there is no link matrix; name a CSV or"):
        read_link_matrix(tmp_path / "nowhere.csv")
    with pytest.raises(ProfileUnreadableError, match="File name too long"):
        read_link_matrix(tmp_path / ("x" * 5000))


def test_a_profile_that_names_no_hosts_is_no_link_matrix(tmp_path: Path) -> None:
    axes = {"bytes": 8, "sender": 0, "receiver": 1, "lanes": 1, "world": 2}
    row = Measurement(case=Case(operation="link", kind="one_way", axes=axes), times_s=(1e-3, 1e-3))
    write_profile(tmp_path, fake_profile([row], machine=fake_machine(world=2)))
    with pytest.raises(ProfileUnreadableError, match="knows no two nodes by name"):
        read_link_matrix(tmp_path)
