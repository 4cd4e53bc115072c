"""Ranks of a launcher meet at rank 0, or one line says who did not come or where nobody was."""

import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from profilers.errors import RankError
from profilers.links.master_address import (
    ConnectedRanks,
    address_of,
    nic,
    own_address,
    slurms_address,
    wait_for_ranks,
)
from profilers.links.team import Place, ranks_per_node
from profilers.ranks import RankInfo
from tests.patience import patient_s
from tests.rows import each_row


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _rank(rank: int, *, world: int, port: int, patience_s: float | None = None) -> ConnectedRanks:
    info = RankInfo(
        rank=rank, world=world, local_rank=rank, local_world=world, node=0, master_port=port
    )
    return wait_for_ranks(info, patience_s=patience_s or patient_s(60.0))


def test_ranks_connect_and_share_a_store() -> None:
    port = _free_port()
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(_rank, rank, world=3, port=port) for rank in (1, 2, 0)]
        second, third, first = (each.result(timeout=patient_s(60.0)) for each in waiting)
        second.store.set("said", "by rank 1")
        assert third.store.get("said") == b"by rank 1"
        assert {first.nic, second.nic, third.nic} == {"lo"}


def test_a_rank_that_does_not_come_or_connect_is_named() -> None:
    with pytest.raises(RankError, match=r"2 of 3 ranks did not connect within 1 s: 1, 2; look for"):
        _rank(0, world=3, port=_free_port(), patience_s=1.0)
    port = _free_port()
    with pytest.raises(RankError, match=rf"rank 1 did not reach rank 0 at 127.0.0.1:{port} within"):
        _rank(1, world=2, port=port, patience_s=1.0)


def test_a_taken_port_is_distinguished_from_a_missing_host() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RankError, match=f"port {port} of rank 0's host is taken; export"):
            _rank(0, world=2, port=port, patience_s=2.0)


def _scontrol(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "scontrol"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")


def test_the_address_of_a_node_that_is_no_host_comes_from_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = 'test "$4" = n1.invalid && echo "NodeName=n1 Arch=a NodeAddr=10.1.2.3 Other=x"'
    _scontrol(tmp_path, says, monkeypatch)
    assert address_of("n1.invalid", is_slurms=True) == "10.1.2.3"
    assert address_of("127.0.0.1", is_slurms=True) == "127.0.0.1"
    assert slurms_address("$(reboot)") == ""
    with pytest.raises(RankError, match=r"'n2.invalid', where rank 0 .* export MASTER_ADDR="):
        address_of("n2.invalid", is_slurms=True)
    with pytest.raises(RankError, match="is no host"):
        address_of("n1.invalid", is_slurms=False)


def test_a_rank_on_loopback_takes_the_nic_that_leads_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Address:
        def __init__(self, address: str) -> None:
            self.address = address

    cards = {"lo": [Address("127.0.0.1")], "eth1": [Address("10.9.9.9")]}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: cards)
    monkeypatch.setattr(
        "profilers.links.master_address.own_address",
        lambda *, towards: {"10.0.0.2": "10.9.9.9"}[towards],
    )
    assert nic(local_address="127.0.1.1", others=["127.0.1.1", "10.0.0.2"]) == "eth1"
    assert nic(local_address="127.0.1.1", others=["127.0.1.1", "127.0.1.1"]) == "lo"
    assert nic(local_address="10.9.9.9", others=["127.0.1.1", "10.9.9.9"]) == "eth1"
    assert nic(local_address="10.7.7.7", others=["10.0.0.2", "10.7.7.7"]) == ""


def test_loopback_and_nodes_are_known() -> None:
    assert own_address(towards="127.0.0.1") == "127.0.0.1"
    assert own_address(towards="no-such-host.invalid") == "127.0.0.1"
    slurm: list[Place] = [("n1", 0), ("n1", 0), ("n2", 1), ("n2", 1)]
    assert ranks_per_node(slurm) == 2
    # Two agents of torchrun on one host are two nodes; mpirun says nothing, so one host is one.
    assert ranks_per_node([("host", 0), ("host", 1)]) == 1
    assert ranks_per_node([("host", None), ("host", None)]) == 2


@each_row(
    ("places", "said"),
    [
        ([("a", None), ("b", None), ("a", None), ("b", None)], "--map-by slot"),
        ([("a", 0), ("a", 0), ("b", 1)], "a runs 2 ranks and b 1"),
    ],
)
def test_ranks_that_are_not_laid_out_node_by_node_are_refused(
    places: list[Place], said: str
) -> None:
    with pytest.raises(RankError, match=said):
        ranks_per_node(places)
