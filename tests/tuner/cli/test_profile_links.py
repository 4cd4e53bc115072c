"""What `profile show --links` and `--stragglers` say to a reader."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from profilers.records import Case, Measurement, Profile
from profilers.store import write_profile
from tests.expect import contains
from tests.profilers.testing import fake_machine, fake_profile, gemm_row
from tests.tuner.cli.refusals import output, refusal
from tuner.cli import app as frame
from tuner.cli.profile_text import (
    MOST_LINKS,
    links_json,
    links_text,
    stragglers_text,
)

GIGABIT = 1.25e8


def _link(sender: int, receiver: int, *, world: int, rate: float, lanes: int = 1) -> Measurement:
    size = 2**22
    axes = {
        "bytes": size,
        "sender": sender,
        "receiver": receiver,
        "lanes": lanes,
        "world": world,
    }
    case = Case(operation="link", kind="one_way", axes=axes)
    return Measurement(case=case, rank=sender, times_s=(size / rate,) * 5)


def _profile(rows: Iterator[Measurement], *, world: int, per_node: int) -> Profile:
    hosts = tuple(f"host-{rank // per_node}" for rank in range(world))
    machine = fake_machine(world=world)
    machine = machine.model_copy(update={"hosts": hosts, "ranks_per_node": per_node})
    return fake_profile(tuple(rows), machine=machine)


def _two_nodes(*, crowded: float) -> Iterator[Measurement]:
    for node in (0, 2):
        yield _link(node, node + 1, world=4, rate=80 * GIGABIT)
        yield _link(node + 1, node, world=4, rate=80 * GIGABIT)
    yield _link(0, 2, world=4, rate=GIGABIT)
    yield _link(2, 0, world=4, rate=GIGABIT)
    for a, b in ((0, 2), (1, 3), (2, 0), (3, 1)):
        yield _link(a, b, world=4, rate=crowded * GIGABIT, lanes=2)


def test_links_are_summed_up_by_class_and_listed_by_the_names_of_hosts() -> None:
    text = links_text(_profile(_two_nodes(crowded=0.5), world=4, per_node=2))
    lines = text.splitlines()
    assert lines[1].split() == ["inside", "nodes", "4", "80", "Gbit/s", "80", "Gbit/s"]
    assert lines[2].split() == ["between", "nodes", "2", "1", "Gbit/s", "1", "Gbit/s"]
    assert any(line.startswith("  rank 0 on host-0  rank 2 on host-1") for line in lines)
    assert (
        "2 concurrent pairs between two nodes get 50 % of a single pair's: the pairs share a NIC"
        in text
    )


def test_lanes_with_cards_of_their_own_are_told() -> None:
    text = links_text(_profile(_two_nodes(crowded=0.98), world=4, per_node=2))
    assert "98 % of a single pair's: each pair has its own NIC" in text


def test_of_many_links_the_slowest_are_listed() -> None:
    nodes = 10
    rows = (
        _link(a, b, world=nodes, rate=GIGABIT * (0.1 if (a, b) == (8, 9) else 1.0))
        for a in range(nodes)
        for b in range(nodes)
        if a != b
    )
    profile = _profile(rows, world=nodes, per_node=1)
    contains(
        links_text(profile),
        f"the {MOST_LINKS} slowest of 90; all of them: --json",
        "rank 8 on host-8  rank 9 on host-9",
    )
    assert len(links_json(profile)) == 90


def test_one_rank_has_no_links() -> None:
    assert links_text(fake_profile(())).startswith("no links were measured")


def test_ranks_that_share_cores_are_said_not_to_be_judged() -> None:
    assert "is not compared" in stragglers_text((), shares_cores=True)
    text = stragglers_text((), shares_cores=False)
    assert text == "no rank, link or node is slower than its peers beyond noise"


def test_a_gate_does_not_pass_where_nothing_was_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "alone")
    write_profile(tmp_path / "alone", fake_profile((gemm_row(8, 1.0),)))
    arguments = ["profile", "show", store, "--stragglers"]
    assert output(capsys, arguments).startswith("nothing was compared: no two ranks did the same")
    assert f"{store}: nothing was compared" in refusal(capsys, [*arguments, "--strict"])


def test_a_gate_passes_where_peers_are_alike(tmp_path: Path) -> None:
    rows = (_link(a, 1 - a, world=2, rate=GIGABIT) for a in (0, 1))
    write_profile(tmp_path, _profile(rows, world=2, per_node=1))
    assert frame.run(["profile", "show", str(tmp_path), "--stragglers", "--strict"]) == 0
