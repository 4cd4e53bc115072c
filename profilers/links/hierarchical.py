"""The all-to-all in two stages: between nodes to the rank of one's own place, then inside the node.

    1. across    every rank sends to its counterpart on node k all that is meant for node k's ranks
    2. repack    what arrived, by source node then receiver, is laid out by receiver
    3. inside    every rank passes on what is meant for its neighbours
    4. repack    what arrived, by source place then node, is laid out by source rank, as the flat
                 all-to-all leaves it

Each rank then talks to one peer a node instead of all ranks of it: fewer and larger messages over
the slow link, for a second all-to-all on the fast one and two copies. Bytes are counted as for
`all_to_all`, so that the two kinds of row can be compared at one size. This is the all-to-all of
HierMoE (arXiv 2508.09591, section 3) for rows without duplicates; what leaving out duplicates saves
on top depends on the routing and is measured by the reference step (profilers/steps/dispatch.py).

Letters: N nodes, M ranks of the group on each, e elements for each rank.
"""

from collections.abc import Callable

import torch

from profilers.links.groups import Shape

AllToAll = Callable[[torch.Tensor, torch.Tensor], object]
"""A flat all-to-all within one stage's group: into the first buffer, from the second."""


def stages(shape: Shape, *, local_world: int) -> tuple[Shape, Shape] | None:
    """Return the shapes across and inside nodes; None if there are no two stages.

    There are if a group has several ranks on each of several nodes, all ranks of a node belong
    to such groups, and so every stage's groups tile the world too.
    """
    if local_world % shape.stride:
        return None
    inside = local_world // shape.stride
    if inside < 2 or shape.ranks % inside or shape.ranks == inside:
        return None
    across = Shape(ranks=shape.ranks // inside, stride=local_world)
    return across, Shape(ranks=inside, stride=shape.stride)


def prepare(
    *,
    nodes: int,
    neighbours: int,
    across: AllToAll,
    inside: AllToAll,
    sent: torch.Tensor,
    received: torch.Tensor,
) -> Callable[[], object]:
    """Allocate the buffers between the stages; running it needs every rank of both groups.

    Args:
        nodes: N.
        neighbours: M.
        across: all-to-all with this rank's counterparts, in the order of nodes.
        inside: all-to-all with this rank's neighbours.
        sent: N M e elements by receiving rank.
        received: likewise, by sending rank.
    """
    per_rank = sent.numel() // (nodes * neighbours)
    arrived, by_receiver, handed = (torch.empty_like(sent) for _ in range(3))

    def run() -> None:
        across(arrived, sent)
        _transposed(arrived, nodes, neighbours, per_rank, out=by_receiver)
        inside(handed, by_receiver)
        _transposed(handed, neighbours, nodes, per_rank, out=received)

    return run


def _transposed(
    source: torch.Tensor, rows: int, columns: int, elements: int, *, out: torch.Tensor
) -> None:
    """Blocks [rows, columns] of so many elements to [columns, rows]."""
    out.view(columns, rows, elements).copy_(source.view(rows, columns, elements).transpose(0, 1))
