"""Clusters of experts with the same token transitions, numbered along the chain.

    L layers   T = L - 1 pairs of layers   E experts   G ranks, S / G slots each

Experts of a layer that receive from, and send to, the same experts belong together, and that shows
before anything is placed: the cosine between their rows of in- and outgoing flow, square roots
taken (Hellinger's distance) so that a few heavy cells do not decide, the mean row taken off.
Clusters of one rank's slots are grown by `greedy_groups.py`. Then each layer's clusters are matched
to those of the layer before by the flow between them, which numbers them along the chain. Loads,
costs and nodes are ignored; swaps are for that.
"""

import numpy as np

from solvers.placement.greedy_groups import grown_groups
from solvers.placement.matching import augmented
from solvers.placement.ranks import Floats, Ints


def clusters_along_chain(flow_TEE: Floats, *, num_ranks: int) -> Ints:
    """Return rank_LE: equal clusters; those with the most flow between them on the same rank."""
    num_layers, num_experts = len(flow_TEE) + 1, flow_TEE.shape[1]
    rank_LE = np.empty((num_layers, num_experts), dtype=np.int64)
    for layer in range(num_layers):
        rank_LE[layer] = grown_groups(_likeness_EE(flow_TEE, layer), num_ranks)
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


def _between_GG(flow_EE: Floats, rank_2E: Ints, num_ranks: int) -> Floats:
    pair_EE = rank_2E[0][:, None] * num_ranks + rank_2E[1]
    sums = np.bincount(pair_EE.ravel(), flow_EE.ravel(), minlength=num_ranks**2)
    return np.asarray(sums, dtype=np.float64).reshape(num_ranks, num_ranks)
