"""Static dispatch: each source rank sends an expert's tokens to one replica, chosen once.

A rank that holds the expert keeps its tokens. Otherwise the first replica on its node takes them,
where that narrows the choice: not where all replicas are on that node. Ranks that are left draw one
replica each, by equal chances, and keep to it.

Source:  SGLang 0.5.23, `--ep-dispatch-algorithm static` with an all-to-all backend
         (sglang/srt/eplb/expert_location.py). There each rank deals replicas to all that are left,
         from a stream of its own past, and keeps its own.
Differs: draws are independent. The engine's are a little more even within a node: run on 16 ranks
         in nodes of 4, they vary 0.84 times as much; everything but the draws came out equal.
Valid:   sources hold the same shares of an expert's tokens in every pass.
"""

import numpy as np

from solvers.placement.dispatch.case import DispatchCase, split_loads
from solvers.placement.ranks import Floats, Ints, Ranks


def rank_loads(case: DispatchCase) -> Floats:
    """Return token copies of each rank, `[P][L][G]`."""
    source_ratio_HLE = case.source_ratio_HLE
    split_LEG = (case.copies_LEG > 0).astype(np.float64)
    rng = np.random.default_rng(case.seed)
    rank_S = case.ranks.rank_S
    for layer, expert in np.argwhere(case.copies_LE > 1):
        host_R = rank_S[np.flatnonzero(case.placement.expert_LS[layer] == expert)]
        target_H = targets(host_R, ranks=case.ranks, rng=rng)
        split_LEG[layer, expert] = np.bincount(
            target_H, weights=source_ratio_HLE[:, layer, expert], minlength=case.ranks.num_ranks
        )
    return split_loads(case, split_LEG)


def targets(host_R: Ints, *, ranks: Ranks, rng: np.random.Generator) -> Ints:
    """Return, for each source rank, the rank whose replica it uses.

    Args:
        host_R: ranks of the replicas in slot order; one that holds two stands twice.
        ranks: all of them, with their nodes.
        rng: chooses for the sources that have no replica near.
    """
    target_H = rng.choice(host_R, size=ranks.num_ranks)
    host_node_R = ranks.node_G[host_R]
    if (host_node_R != host_node_R[0]).any():
        # Written from the last replica to the first, so that the first one stays.
        for host in host_R[::-1]:
            target_H[ranks.node_G == ranks.node_G[host]] = host
    target_H[host_R] = host_R
    return target_H
