"""The all-to-all in two stages leaves what the flat one leaves."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.links.groups import HIERARCHICAL, Shape, members, shapes
from profilers.links.hierarchical import prepare, stages
from profilers.links.suite import kinds_of
from tests.patience import patient_s
from tests.rows import each_row


def test_the_stages_of_two_nodes_of_four_by_hand() -> None:
    # All eight ranks: pairs four apart between the nodes, then each node's four.
    assert stages(Shape(ranks=8, stride=1), local_world=4) == (
        Shape(ranks=2, stride=4),
        Shape(ranks=4, stride=1),
    )
    # Every second rank: the same pairs, then the two of the group on a node.
    assert stages(Shape(ranks=4, stride=2), local_world=4) == (
        Shape(ranks=2, stride=4),
        Shape(ranks=2, stride=2),
    )


@each_row(("ranks", "stride"), [(4, 1), (2, 2), (2, 4)])
def test_a_group_inside_a_node_or_of_one_rank_a_node_has_one_stage(ranks: int, stride: int) -> None:
    shape = Shape(ranks=ranks, stride=stride)
    assert stages(shape, local_world=4) is None
    assert HIERARCHICAL not in kinds_of(shape, world=8, local_world=4)


@settings(deadline=None, max_examples=60)
@given(nodes=st.integers(1, 6), local_world=st.integers(1, 8))
def test_both_stages_tile_the_world_and_stay_in_the_group(nodes: int, local_world: int) -> None:
    world = nodes * local_world
    for shape in shapes(world):
        two = stages(shape, local_world=local_world)
        spans = any(
            group[0] // local_world != group[-1] // local_world
            for group in members(shape, world=world)
        )
        if two is None:
            continue
        assert spans
        across, inside = two
        own = {rank: set(group) for group in members(shape, world=world) for rank in group}
        for group in members(across, world=world):
            assert len({rank // local_world for rank in group}) == len(group)
            assert set(group) <= own[group[0]]
        for group in members(inside, world=world):
            assert len({rank // local_world for rank in group}) == 1
            assert set(group) <= own[group[0]]


class Board:
    """Exchanges between threads, as a group of a stage would do them."""

    def __init__(self, ranks: int) -> None:
        self._sent: dict[int, torch.Tensor] = {}
        self._barrier = Barrier(ranks)

    def all_to_all(self, place: int, received: torch.Tensor, sent: torch.Tensor) -> None:
        self._sent[place] = sent
        self._barrier.wait(timeout=patient_s(60.0))
        shares = [self._sent[peer].chunk(len(self._sent))[place] for peer in sorted(self._sent)]
        received.copy_(torch.cat(shares))
        self._barrier.wait(timeout=patient_s(60.0))


def test_every_rank_receives_what_the_flat_all_to_all_delivers() -> None:
    nodes, neighbours, elements = 3, 2, 5
    world = nodes * neighbours
    across = [Board(nodes) for _ in range(neighbours)]
    inside = [Board(neighbours) for _ in range(nodes)]

    def rank_of(rank: int) -> torch.Tensor:
        node, place = divmod(rank, neighbours)
        sent = torch.arange(world * elements, dtype=torch.float32) + 1000.0 * rank
        received = torch.zeros_like(sent)
        prepare(
            nodes=nodes,
            neighbours=neighbours,
            across=partial(across[place].all_to_all, node),
            inside=partial(inside[node].all_to_all, place),
            sent=sent,
            received=received,
        )()
        return received

    with ThreadPoolExecutor(world) as threads:
        found = list(threads.map(rank_of, range(world)))
    for rank, received in enumerate(found):
        # From rank r come its elements for this rank.
        own = torch.arange(rank * elements, (rank + 1) * elements, dtype=torch.float32)
        expected = torch.cat([own + 1000.0 * source for source in range(world)])
        assert torch.equal(received, expected)
