"""Who lags behind its peers, and who is merely one of a mixed lot."""

import random
from pathlib import Path

import numpy as np
import pytest

from profilers.imports.link_matrix import read_link_matrix
from profilers.links.matrix import links_of, shared_ratio
from profilers.records import Case, Measurement
from profilers.store import read_profile
from profilers.stragglers import Straggler, has_peers, stragglers
from tests.expect import present
from tests.profilers.testing import fake_machine, fake_profile
from tests.rows import each_row

GIGABIT = 1.25e8
LARGEST = 2**23


def _noisy(
    seconds: float, *, spread: float = 0.03, repeats: int = 20, seed: int = 0
) -> list[float]:
    draw = random.Random(f"{seconds} {seed}")
    return [seconds * draw.lognormvariate(0.0, spread) for _ in range(repeats)]


def _product(rank: int, seconds: float, *, world: int, spread: float = 0.03) -> Measurement:
    case = Case(operation="every_rank", kind="gemm", axes={"size": 512, "world": world})
    return Measurement(
        case=case, rank=rank, times_s=tuple(_noisy(seconds, spread=spread, seed=rank))
    )


def _message(
    sender: int, receiver: int, *, world: int, rate: float, lanes: int = 1
) -> list[Measurement]:
    rows = []
    for kind, size in (("round_trip", 8), ("one_way", 2**16), ("one_way", LARGEST)):
        if lanes > 1 and size != LARGEST:
            continue
        axes = {
            "bytes": size,
            "sender": sender,
            "receiver": receiver,
            "lanes": lanes,
            "world": world,
        }
        seconds = 2e-3 + (0.0 if kind == "round_trip" else size / rate)
        case = Case(operation="link", kind=kind, axes=axes)
        times_s = tuple(_noisy(seconds, seed=sender * 64 + receiver))
        rows.append(Measurement(case=case, rank=sender, times_s=times_s))
    return rows


def _found(rows: list[Measurement], *, world: int, per_node: int = 1) -> tuple[Straggler, ...]:
    hosts = tuple(f"host-{rank // per_node}" for rank in range(world))
    machine = fake_machine(world=world).model_copy(
        update={"hosts": hosts, "ranks_per_node": per_node}
    )
    return stragglers(fake_profile(rows, machine=machine))


def _mesh(world: int, slow: dict[int, float]) -> list[Measurement]:
    return [
        row
        for sender in range(world)
        for receiver in range(world)
        if sender != receiver
        for row in _message(sender, receiver, world=world, rate=GIGABIT * slow.get(sender, 1.0))
    ]


def test_a_device_that_is_a_quarter_slower_is_named_with_its_host() -> None:
    rows = [_product(rank, 0.0125 if rank == 5 else 0.01, world=8) for rank in range(8)]
    (found,) = _found(rows, world=8, per_node=4)
    assert (found.what, found.where, found.doing) == ("device", "rank 5 on host-1", "gemm")
    assert 1.15 < found.ratio < 1.35


def test_ranks_that_share_cores_are_not_compared() -> None:
    rows = [_product(rank, 0.02 if rank == 1 else 0.01, world=4) for rank in range(4)]
    shared = fake_machine(world=4).model_copy(update={"oversubscribed": True})
    assert stragglers(fake_profile(rows, machine=fake_machine(world=4)))
    assert stragglers(fake_profile(rows, machine=shared)) == ()


@each_row("world", (2, 4, 8, 64))
def test_noise_names_no_rank(world: int) -> None:
    assert _found([_product(rank, 0.01, world=world) for rank in range(world)], world=world) == ()


def test_mixed_ranks_and_small_effects_name_no_rank() -> None:
    rows = [_product(rank, 0.01 * (1.0 + 0.15 * (rank % 4)), world=8) for rank in range(8)]
    assert _found(rows, world=8) == ()
    rows = [
        _product(rank, 0.0105 if rank == 0 else 0.01, world=4, spread=0.001) for rank in range(4)
    ]
    assert _found(rows, world=4) == ()


def test_a_node_whose_every_link_is_slow_is_named_instead_of_its_links() -> None:
    (found,) = _found(_mesh(4, {2: 0.2}), world=4)
    assert (found.what, found.where, found.doing) == ("node", "host-2", "sending")
    assert 4.0 < found.ratio < 5.5
    (found,) = _found(_mesh(2, {1: 0.2}), world=2)
    assert (found.where, found.doing) == ("host-1", "sending")
    assert _found(_mesh(5, {}), world=5) == ()


def test_one_slow_link_is_named_by_its_ends() -> None:
    rows = [row for row in _mesh(4, {}) if row.case.axes["sender"] != 0 or row.rank != 0]
    for receiver in (1, 2, 3):
        rate = GIGABIT * (0.3 if receiver == 3 else 1.0)
        rows += _message(0, receiver, world=4, rate=rate)
    (found,) = _found(rows, world=4)
    assert found.what == "link"
    assert found.where == "host-0 -> host-3 (rank 0 -> 3)"


def test_lanes_that_share_a_nic_get_their_share() -> None:
    rows = [
        *_message(0, 2, world=4, rate=GIGABIT),
        *_message(0, 2, world=4, rate=GIGABIT / 2.0, lanes=2),
        *_message(1, 3, world=4, rate=GIGABIT / 2.0, lanes=2),
    ]
    machine = fake_machine(world=4).model_copy(update={"ranks_per_node": 2})
    found = links_of(fake_profile(rows, machine=machine))
    assert 0.45 < present(shared_ratio(found)) < 0.55
    assert [link.is_inside for link in found] == [False, False, False]


def test_links_have_their_bandwidth_and_latency() -> None:
    machine = fake_machine(world=2).model_copy(update={"ranks_per_node": 1})
    (link,) = links_of(fake_profile(_message(0, 1, world=2, rate=GIGABIT), machine=machine))
    assert 0.9 * GIGABIT < link.bytes_per_s < 1.1 * GIGABIT
    assert 0.9e-3 < present(link.latency_s) < 1.1e-3
    rows = [_sized(0, seconds=0.5), _sized(0, seconds=0.5, lanes=2)]
    assert links_of(fake_profile(rows, machine=fake_machine(world=2))) == ()


@each_row("sizes", [(2**20,), (2**20, 2**20), (0, 2**20)])
def test_messages_of_one_size_give_a_bandwidth(sizes: tuple[int, ...]) -> None:
    rows = [_sized(size, seconds=0.5) for size in sizes]
    (link,) = links_of(fake_profile(rows, machine=fake_machine(world=2)))
    assert link.bytes_per_s == 2.0**21


def _sized(size: int, *, seconds: float, lanes: int = 1) -> Measurement:
    axes = {"bytes": size, "sender": 0, "receiver": 1, "lanes": lanes, "world": 2}
    case = Case(operation="link", kind="one_way", axes=axes)
    return Measurement(case=case, times_s=(seconds, seconds))


def test_compared_members_had_peers() -> None:
    product = [_product(rank, 0.01, world=2) for rank in range(2)]
    single, both = fake_machine(), fake_machine(world=2)
    shared = both.model_copy(update={"oversubscribed": True})
    assert has_peers(fake_profile(product, machine=both))
    assert has_peers(fake_profile(_mesh(2, {}), machine=both))
    assert not has_peers(fake_profile((), machine=single))
    assert not has_peers(fake_profile(product[:1], machine=single))
    assert not has_peers(fake_profile(product, machine=shared))
    assert not has_peers(fake_profile(_message(0, 1, world=2, rate=GIGABIT), machine=both))
    once = [row.model_copy(update={"times_s": row.times_s[:1]}) for row in product]
    assert not has_peers(fake_profile(once, machine=both))


# The stored profile of four emulated nodes: 1 Gbit/s and 1 ms, one node slowed to 200 Mbit/s.

FOUR_NODES = Path(__file__).parents[2] / "examples/profiles/four-nodes"
SLOWED = 2


def test_only_the_slowed_node_is_named() -> None:
    (found,) = stragglers(read_profile(FOUR_NODES))
    assert (found.what, found.where, found.doing) == ("node", "node-2", "sending")
    assert 4.0 < found.ratio < 6.0


def test_links_are_as_they_were_set() -> None:
    links = links_of(read_profile(FOUR_NODES))
    assert len(links) == 12
    for link in links:
        rate = 0.2 * GIGABIT if link.sender == SLOWED else GIGABIT
        # The token bucket's burst and the relay's queue move single links of the fast nodes.
        assert link.bytes_per_s == pytest.approx(rate, rel=0.20)
        assert 1.0e-3 < present(link.latency_s) < 1.25e-3
    fast = [link.bytes_per_s for link in links if link.sender != SLOWED]
    assert float(np.median(fast)) == pytest.approx(GIGABIT, rel=0.15)


def test_a_profile_is_a_link_matrix_too() -> None:
    matrix = read_link_matrix(FOUR_NODES)
    assert matrix.nodes == ("node-0", "node-1", "node-2", "node-3")
    slow = matrix.bytes_per_s_NN[SLOWED]
    assert np.isinf(slow[SLOWED])
    assert np.delete(slow, SLOWED).max() < 0.3 * np.delete(matrix.bytes_per_s_NN[0], 0).min()
