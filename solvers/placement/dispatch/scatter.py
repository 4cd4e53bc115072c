"""Mean and variance, over launches, of the share of an expert's tokens that one slot takes.

    L layers   E experts   G ranks   S slots   N nodes   r replicas   p ranks of a node

Near replicas come first, far ones are assigned once a launch (`nearest.py` and `launches.py`, whose
law is put in formulas here). With as many tokens from every rank, in units of one
source rank, 1 / G:

    on several nodes    1 for the first slot of a rank, its own tokens
                        p - (ranks of the node that hold the expert) for the first slot of a node
                        far / r for every slot, far being the ranks of nodes without a replica
    all on one node     1 for the first slot of a rank, and (G - holding ranks) / r for every slot

The last term of each is the mean over far ranks. A node whose ranks share one order gets q = p
of k places. A replica owns M of all k, floor(k / r) or one more with probability b =
(k mod r) / r, so that for places without replacement

    P2  = E[M (M - 1)] / (k (k - 1))             both of two places
    var = q (1 - 1 / r) / r + q (q - 1) (P2 - 1 / r^2)

and nodes are independent. The ranks of the one node that holds all replicas have drawn
for different experts and are taken as independent of each other: (1 - 1 / r) / r each.

With one replica on every node, or with one node and a replica on every rank, no rank is far.

Valid:  ranks of a node share an assignment, ranks of two nodes do not (`launches.py`); nodes of
        equal size for the variance, of any size for the mean.
"""

from dataclasses import dataclass

import numpy as np

from solvers.placement.ranks import Floats, Ints, Ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shares:
    """Shares of its expert's tokens that each slot takes."""

    mean_LS: Floats
    variance_LS: Floats


def near_shares(expert_LS: Ints, *, ranks: Ranks, num_experts: int) -> Shares:
    """Return what every slot of any placement takes."""
    layer_L1 = np.arange(len(expert_LS))[:, None]
    shape = (len(expert_LS), num_experts)
    size_N = np.bincount(ranks.node_G)
    node_S = ranks.node_G[ranks.rank_S]
    first_of_rank_LS, first_of_node_LS = _firsts(expert_LS, ranks)
    copies_LE, nodes_LE, near_LE = (np.zeros(shape) for _ in range(3))
    np.add.at(copies_LE, (layer_L1, expert_LS), 1.0)
    np.add.at(nodes_LE, (layer_L1, expert_LS), first_of_node_LS)
    np.add.at(near_LE, (layer_L1, expert_LS), first_of_node_LS * size_N[node_S])
    holders_LNE = np.zeros((len(expert_LS), len(size_N), num_experts))
    np.add.at(holders_LNE, (layer_L1, node_S, expert_LS), first_of_rank_LS)
    copies_LS, nodes_LS, near_LS = (
        of_LE[layer_L1, expert_LS] for of_LE in (copies_LE, nodes_LE, near_LE)
    )
    holders_LS = holders_LNE[layer_L1, node_S, expert_LS]
    is_one_node_LS = nodes_LS == 1.0
    dealt_LS = ranks.num_ranks - np.where(is_one_node_LS, holders_LS, near_LS)
    by_node_LS = first_of_node_LS * (size_N[node_S] - holders_LS)
    mean_LS = first_of_rank_LS + np.where(is_one_node_LS, 0.0, by_node_LS) + dealt_LS / copies_LS
    far_nodes_LS = len(size_N) - nodes_LS
    far_size_LS = (ranks.num_ranks - near_LS) / np.maximum(far_nodes_LS, 1.0)
    independent_LS = np.where(is_one_node_LS, size_N[node_S] - holders_LS, 0.0)
    variance_LS = far_nodes_LS * dealt_variance(far_size_LS, dealt_LS, copies_LS)
    variance_LS += independent_LS * (1.0 - 1.0 / copies_LS) / copies_LS
    is_single_LS = copies_LS == 1.0
    return Shares(
        mean_LS=np.where(is_single_LS, 1.0, mean_LS / ranks.num_ranks),
        variance_LS=np.where(is_single_LS, 0.0, variance_LS / ranks.num_ranks**2),
    )


def dealt_variance(places: Floats, dealt: Floats, replicas: Floats) -> Floats:
    """Return the variance of how many of so many places one replica gets."""
    each = np.floor(dealt / replicas)
    chance = dealt / replicas - each
    pairs = np.maximum(dealt * (dealt - 1.0), 1.0)
    both = each * (each - 1.0 + 2.0 * chance) / pairs
    variance = places * (1.0 - 1.0 / replicas) / replicas
    variance = variance + places * (places - 1.0) * (both - 1.0 / replicas**2)
    return np.asarray(np.maximum(variance, 0.0))


def spread_variance(copies: Ints, *, ranks: Ranks) -> Floats:
    """Return the variance of a replica's share where no two stand on one node, or there is one.

    The mean is then 1 / copies. Above one replica a node, or a rank where there is one node, the
    number is that of the last count.
    """
    nodes, total = ranks.num_nodes, float(ranks.num_ranks)
    replicas = np.minimum(copies, nodes if nodes > 1 else ranks.num_ranks).astype(np.float64)
    if nodes == 1:
        return np.asarray((total - replicas) * (1.0 - 1.0 / replicas) / replicas / total**2)
    size = total / nodes
    variance = (nodes - replicas) * dealt_variance(
        np.full(replicas.shape, size), (nodes - replicas) * size, replicas
    )
    return np.asarray(np.where(replicas == 1.0, 0.0, variance / total**2))


def _firsts(expert_LS: Ints, ranks: Ranks) -> tuple[Floats, Floats]:
    """1 where a slot is the first with its expert on its rank, and on its node."""
    order_LS = np.argsort(expert_LS, axis=1, kind="stable")
    expert_sorted = np.take_along_axis(expert_LS, order_LS, axis=1)
    firsts = []
    for group_S in (ranks.rank_S, ranks.node_G[ranks.rank_S]):
        group_sorted = group_S[order_LS]
        is_first = np.ones(expert_LS.shape, dtype=bool)
        is_first[:, 1:] = (np.diff(expert_sorted, axis=1) != 0) | (
            np.diff(group_sorted, axis=1) != 0
        )
        first_LS = np.empty(expert_LS.shape)
        np.put_along_axis(first_LS, order_LS, is_first.astype(np.float64), axis=1)
        firsts.append(first_LS)
    return firsts[0], firsts[1]
