"""Shares of slots where near replicas come first: their mean over launches, and its variance.

    L layers   E experts   G ranks   S slots   N nodes   r replicas   p ranks of a node
    X slots, layer by layer and expert by expert

The rule is that of `launches.py`, put in formulas. With as many tokens from every rank, in units of
one source rank, 1 / G:

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

With one replica on every node, or with one node and a replica on every rank, no rank is far. Where
no two replicas stand on one node of equal ones, each expects 1 / r.

Valid:  ranks of a node share an assignment, ranks of two nodes do not (`launches.py`); nodes of
        equal size for the variance, of any size for the mean.
"""

from dataclasses import dataclass

import numpy as np

from solvers.placement.ranks import Floats, Ints, Ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NearShares:
    """Shares of its expert's tokens that each slot takes."""

    near_LS: Floats
    """Share from sources that are near to the slot."""
    far_LS: Floats
    """Share from sources that are far from the expert, whichever replica takes it."""
    mean_LS: Floats
    """Expected share: far sources take any replica by equal chances."""
    variance_LS: Floats


def near_shares(expert_LS: Ints, *, ranks: Ranks, num_experts: int) -> NearShares:
    """Return what every slot of any placement takes."""
    key_X = (expert_LS + num_experts * np.arange(len(expert_LS))[:, None]).ravel()
    order_X = np.argsort(key_X, kind="stable")
    key_X, rank_X = key_X[order_X], np.tile(ranks.rank_S, len(expert_LS))[order_X]
    size_N = np.bincount(ranks.node_G)
    size_X = size_N[ranks.node_G[rank_X]].astype(np.float64)
    is_new_X = np.diff(key_X, prepend=-1) != 0
    first_of_rank_X = is_new_X | (np.diff(rank_X, prepend=-1) != 0)
    first_of_node_X = is_new_X | (np.diff(ranks.node_G[rank_X], prepend=-1) != 0)
    expert_X, place_X = np.cumsum(is_new_X) - 1, np.cumsum(first_of_node_X) - 1
    copies_X = np.bincount(expert_X)[expert_X].astype(np.float64)
    nodes_X = np.bincount(expert_X, first_of_node_X)[expert_X]
    on_nodes_X = np.bincount(expert_X, first_of_node_X * size_X)[expert_X]
    holders_X = np.bincount(place_X, first_of_rank_X)[place_X]
    is_one_node_X = nodes_X == 1.0
    far_X = ranks.num_ranks - np.where(is_one_node_X, holders_X, on_nodes_X)
    served_X = np.where(is_one_node_X, 0.0, first_of_node_X * (size_X - holders_X))
    far_nodes_X = len(size_N) - nodes_X
    far_size_X = (ranks.num_ranks - on_nodes_X) / np.maximum(far_nodes_X, 1.0)
    variance_X = far_nodes_X * dealt_variance(far_size_X, far_X, copies_X)
    independent_X = np.where(is_one_node_X, size_X - holders_X, 0.0)
    variance_X += independent_X * (1.0 - 1.0 / copies_X) / copies_X
    is_single_X = copies_X == 1.0
    near_X = np.where(is_single_X, ranks.num_ranks, first_of_rank_X + served_X) / ranks.num_ranks
    far_X = np.where(is_single_X, 0.0, far_X) / ranks.num_ranks
    in_slots_MX = np.empty((4, len(order_X)))
    in_slots_MX[:, order_X] = (
        near_X,
        far_X,
        near_X + far_X / copies_X,
        np.where(is_single_X, 0.0, variance_X / ranks.num_ranks**2),
    )
    near_LS, far_LS, mean_LS, variance_LS = in_slots_MX.reshape(4, *expert_LS.shape)
    return NearShares(near_LS=near_LS, far_LS=far_LS, mean_LS=mean_LS, variance_LS=variance_LS)


def dealt_variance(places: Floats, dealt: Floats, replicas: Floats) -> Floats:
    """Return the variance of how many of so many places one replica gets."""
    per_replica = np.floor(dealt / replicas)
    chance = dealt / replicas - per_replica
    pairs = np.maximum(dealt * (dealt - 1.0), 1.0)
    both = per_replica * (per_replica - 1.0 + 2.0 * chance) / pairs
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
