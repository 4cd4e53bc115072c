"""The ranks that experts are placed on, and a placement: the values that every objective shares.

    G ranks   N nodes   S slots of one layer, rank by rank   L layers   E experts

A slot holds one expert; slots of rank g are `first_slot_G[g] .. first_slot_G[g] + slots_G[g] - 1`,
the order that engines read. An expert that is in several slots is replicated.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """Expert-parallel ranks with their slots, speeds and nodes.

    Raises:
        ValueError: the arrays differ in length, a rank has no slot, or a speed is not positive.
    """

    slots_G: Ints
    """Experts that one rank holds in every layer."""
    node_G: Ints
    """Node of each rank, counted from 0; ascending."""
    speed_G: Floats
    """Work per second of a rank, relative to the others; 1 where all are equal."""

    def __post_init__(self) -> None:
        if self.slots_G.ndim != 1 or not len(self.slots_G):
            raise ValueError("ranks need at least one entry")
        if not len(self.slots_G) == len(self.node_G) == len(self.speed_G):
            raise ValueError("slots, nodes and speeds of ranks differ in length")
        if (self.slots_G < 1).any():
            raise ValueError("every rank needs at least one slot")
        if not np.isfinite(self.speed_G).all() or (self.speed_G <= 0.0).any():
            raise ValueError("every speed must be a positive number")
        if self.node_G[0] != 0 or not np.isin(np.diff(self.node_G), (0, 1)).all():
            raise ValueError("nodes of ranks must ascend from 0 without gaps")
        for array in (self.slots_G, self.node_G, self.speed_G):
            array.setflags(write=False)

    @classmethod
    def uniform(
        cls, *, ranks: int, slots_per_rank: int, ranks_per_node: int | None = None
    ) -> "Ranks":
        """Return equal ranks, on one node unless said otherwise."""
        per_node = ranks_per_node or ranks
        return cls(
            slots_G=np.full(ranks, slots_per_rank, dtype=np.int64),
            node_G=np.arange(ranks, dtype=np.int64) // per_node,
            speed_G=np.ones(ranks),
        )

    @property
    def num_ranks(self) -> int:
        """G."""
        return len(self.slots_G)

    @property
    def num_nodes(self) -> int:
        """N."""
        return int(self.node_G[-1]) + 1

    @property
    def num_slots(self) -> int:
        """S."""
        return int(self.slots_G.sum())

    @property
    def rank_S(self) -> Ints:
        """Rank of each slot."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int64), self.slots_G)

    @property
    def first_slot_G(self) -> Ints:
        """First slot of each rank."""
        return np.concatenate(([0], np.cumsum(self.slots_G)[:-1])).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Expert in each slot of each layer; checkers say whether that is legal."""

    expert_LS: Ints
    """Ids of logical experts."""

    def __post_init__(self) -> None:
        if self.expert_LS.ndim != 2 or not np.issubdtype(self.expert_LS.dtype, np.integer):
            raise ValueError("a placement is a table of expert ids, a row a layer")
        self.expert_LS.setflags(write=False)

    def copies_LE(self, num_experts: int) -> Ints:
        """Replicas of each expert."""
        num_layers = len(self.expert_LS)
        flat = (self.expert_LS + num_experts * np.arange(num_layers)[:, None]).ravel()
        counts = np.bincount(flat, minlength=num_layers * num_experts)
        return counts.reshape(num_layers, -1).astype(np.int64)


def contiguous(*, num_layers: int, num_experts: int, num_slots: int) -> Placement:
    """Return the initial placement of engines: experts in order, spare slots from 0 again."""
    row = np.arange(num_slots, dtype=np.int64) % num_experts
    return Placement(expert_LS=np.tile(row, (num_layers, 1)))


def placed(rank_LE: Ints) -> Placement:
    """Return the placement without replicas in which each rank holds its experts, ascending."""
    return Placement(expert_LS=np.argsort(rank_LE, axis=1, kind="stable").astype(np.int64))
