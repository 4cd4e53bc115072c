"""Clusters of experts that exchange tokens with the same experts, and their way along the chain.

    L layers   T = L - 1 pairs of layers   E experts   G ranks, S / G slots each

Experts of a layer that receive from, and send to, the same experts belong together, and that shows
before anything is placed: the cosine between their rows of in- and outgoing flow, square roots
taken (Hellinger's distance) so that a few heavy cells do not decide, the mean row taken off.
Clusters of one rank's slots are grown one after the other from the expert with the closest
company. Then each layer's clusters are matched to those of the layer before by the flow between
them, which numbers them along the chain. Loads, costs and nodes are not looked at; annealing is
for that.
"""

import numpy as np

from solvers.placement.chain.matching import augmented
from solvers.placement.ranks import Floats, Ints


def clusters_along_chain(flow_TEE: Floats, *, num_ranks: int) -> Ints:
    """Return rank_LE: equal clusters, those that exchange most on ranks of one number."""
    num_layers, num_experts = len(flow_TEE) + 1, flow_TEE.shape[1]
    rank_LE = np.empty((num_layers, num_experts), dtype=np.int64)
    for layer in range(num_layers):
        rank_LE[layer] = _clusters_E(_likeness_EE(flow_TEE, layer), num_ranks)
        if layer:
            matched_GG = _between_GG(flow_TEE[layer - 1], rank_LE[layer - 1 : layer + 1], num_ranks)
            number_G = np.empty(num_ranks, dtype=np.int64)
            number_G[augmented(matched_GG)] = np.arange(num_ranks)
            rank_LE[layer] = number_G[rank_LE[layer]]
    return rank_LE


def _likeness_EE(flow_TEE: Floats, layer: int) -> Floats:
    sides = [flow_TEE[layer - 1].T] if layer else []
    sides += [flow_TEE[layer]] if layer < len(flow_TEE) else []
    row_EF = np.sqrt(np.concatenate(sides, axis=1))
    length_E = np.linalg.norm(row_EF, axis=1, keepdims=True)
    row_EF /= np.where(length_E > 0.0, length_E, 1.0)
    row_EF -= row_EF.mean(axis=0)
    return np.asarray(row_EF @ row_EF.T, dtype=np.float64)


def _clusters_E(likeness_EE: Floats, num_clusters: int) -> Ints:
    num_experts = len(likeness_EE)
    size = num_experts // num_clusters
    cluster_E = np.empty(num_experts, dtype=np.int64)
    np.fill_diagonal(likeness_EE, -np.inf)
    free_E = np.ones(num_experts, dtype=bool)
    for cluster in range(num_clusters):
        free_F = np.flatnonzero(free_E)
        among_FF = likeness_EE[np.ix_(free_F, free_F)]
        company_F = np.sort(among_FF, axis=1)[:, len(free_F) - size + 1 :].sum(axis=1)
        seed = free_F[company_F.argmax()]
        total_E = likeness_EE[seed].copy()
        members = [seed]
        free_E[seed] = False
        for _ in range(size - 1):
            closest = int(np.where(free_E, total_E, -np.inf).argmax())
            members.append(closest)
            free_E[closest] = False
            total_E += likeness_EE[closest]
        cluster_E[members] = cluster
    return cluster_E


def _between_GG(flow_EE: Floats, rank_2E: Ints, num_ranks: int) -> Floats:
    pair_EE = rank_2E[0][:, None] * num_ranks + rank_2E[1]
    sums = np.bincount(pair_EE.ravel(), flow_EE.ravel(), minlength=num_ranks**2)
    return np.asarray(sums, dtype=np.float64).reshape(num_ranks, num_ranks)
