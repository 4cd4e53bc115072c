"""Static dispatch: each source rank sends an expert's tokens to one replica, chosen once.

A rank that holds the expert keeps its tokens; otherwise the first replica on its node takes them;
the ranks that have neither are dealt out over all replicas, as evenly as whole ranks allow, by a
draw that is fixed from then on.

Source:  SGLang, `--ep-dispatch-algorithm static` (sglang/srt/eplb/expert_location.py).
Differs: the draw follows the same law, not the engine's own random numbers.
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
        rng: deals out the sources that have no replica near.
    """
    target_H = np.full(ranks.num_ranks, -1, dtype=np.int64)
    # Written from the last replica to the first, so that the first one stays.
    for host in host_R[::-1]:
        target_H[ranks.node_G == ranks.node_G[host]] = host
    target_H[host_R] = host_R
    far_H = np.flatnonzero(target_H < 0)
    rounds, left = divmod(len(far_H), len(host_R))
    dealt = np.concatenate((np.tile(host_R, rounds), rng.permutation(host_R)[:left]))
    target_H[far_H] = rng.permutation(dealt)
    return target_H
