"""Costs with three values (on a rank, inside a node, between nodes) and identical ranks.

    E experts   N nodes   K ranks of a node   S slots of a rank

Most clusters are priced so. Then ranks can be renamed inside their node, and nodes among each
other, without a change of cost: the order of ranks need not be searched, only co-location,
and the cost of a pair of layers is

    other_node * flow - (other_node - same_node) * flow inside nodes
                      - (same_node - same_rank) * flow inside ranks
"""

from dataclasses import dataclass

import numpy as np

from solvers.placement.chain.problem import ChainProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Equal ranks in equal nodes, and the three costs, ascending."""

    num_nodes: int
    ranks_per_node: int
    slots_per_rank: int
    same_rank: float
    same_node: float
    other_node: float

    @property
    def slots_per_node(self) -> int:
        """Experts that a node holds."""
        return self.ranks_per_node * self.slots_per_rank

    @property
    def node_gain(self) -> float:
        """What one token copy saves by staying on its node."""
        return self.other_node - self.same_node

    @property
    def rank_gain(self) -> float:
        """What it saves on top by staying on its rank."""
        return self.same_node - self.same_rank


def hierarchy_of(problem: ChainProblem) -> Hierarchy | None:
    """Return the three costs of a problem; None where costs or ranks are of another kind."""
    ranks, cost_GG = problem.ranks, problem.cost_GG
    ranks_of_N = np.bincount(ranks.node_G)
    if (ranks.slots_G != ranks.slots_G[0]).any() or (ranks_of_N != ranks_of_N[0]).any():
        return None
    is_same_rank = np.eye(ranks.num_ranks, dtype=bool)
    is_same_node = (ranks.node_G[:, None] == ranks.node_G) & ~is_same_rank
    same_rank = float(cost_GG[0, 0])
    same_node = float(cost_GG[is_same_node].max(initial=same_rank))
    is_other = ~(is_same_rank | is_same_node)
    other_node = float(cost_GG[is_other].max(initial=same_node))
    expected_GG = np.where(is_same_rank, same_rank, np.where(is_same_node, same_node, other_node))
    if (cost_GG != expected_GG).any():
        return None
    return Hierarchy(
        num_nodes=ranks.num_nodes,
        ranks_per_node=int(ranks_of_N[0]),
        slots_per_rank=int(ranks.slots_G[0]),
        same_rank=same_rank,
        same_node=same_node,
        other_node=other_node,
    )
