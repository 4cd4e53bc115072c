"""Replicas that are near a source rank, which engines with an all-to-all backend use first.

    H source ranks, H = G ranks   R replicas of one expert, in slot order   L layers   E experts

A rank that holds the expert keeps its tokens: its first replica takes them. Otherwise the first
replica on its node does, where that narrows the choice: not where all replicas are on that node.
An expert of one replica is near to every rank. Sources without a near replica are *far* from it.

Source:  SGLang 0.5.23 (sglang/srt/eplb/expert_location.py); the table that each rank keeps holds
         near replicas only, so that `static`, `dynamic` and `lp` share this part.
"""

import numpy as np

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.kept import by_rank, by_slot, keep, kept, key_of
from solvers.placement.ranks import Floats, Ints, Ranks

FAR = -1


def nearest_H(host_R: Ints, *, ranks: Ranks) -> Ints:
    """Return, for each source rank, the position in `host_R` of its near replica, or `FAR`.

    Args:
        host_R: ranks of the replicas in slot order; one that holds two occurs twice.
        ranks: all of them, with their nodes.
    """
    if len(host_R) == 1:
        return np.zeros(ranks.num_ranks, dtype=np.int64)
    near_H = np.full(ranks.num_ranks, FAR, dtype=np.int64)
    host_node_R = ranks.node_G[host_R]
    if (host_node_R != host_node_R[0]).any():
        first_N = np.full(ranks.num_nodes, FAR, dtype=np.int64)
        # Written from the last replica to the first, so that the first one stays.
        first_N[host_node_R[::-1]] = np.arange(len(host_R))[::-1]
        near_H = first_N[ranks.node_G]
    near_H[host_R[::-1]] = np.arange(len(host_R))[::-1]
    return near_H


def near_and_far(case: DispatchCase) -> tuple[Floats, Floats]:
    """Return what near sources send to each rank, and what far ones send to an expert.

    Shares of the expert's token copies, `[L][E][G]` and `[L][E]`; they sum to 1 over both.
    """
    near_key, far_key = key_of(case, of="near"), key_of(case, of="far")
    share_LS, far_LE = kept(near_key), kept(far_key)
    if share_LS is None or far_LE is None:
        near_LEG, far_LE = _near_and_far(case)
        share_LS = keep(near_key, by_slot(case, near_LEG))
        keep(far_key, far_LE)
    return by_rank(case, share_LS), far_LE


def _near_and_far(case: DispatchCase) -> tuple[Floats, Floats]:
    near_LEG = (case.copies_LEG > 0).astype(np.float64)
    far_LE = np.zeros((case.num_layers, case.num_experts))
    for layer, expert in np.argwhere(case.copies_LE > 1):
        host_R = case.ranks.rank_S[case.placement.expert_LS[layer] == expert]
        near_H = nearest_H(host_R, ranks=case.ranks)
        near_LEG[layer, expert] = np.bincount(
            host_R[near_H[near_H != FAR]], minlength=case.ranks.num_ranks
        )
        far_LE[layer, expert] = (near_H == FAR).sum()
        near_LEG[layer, expert] /= case.ranks.num_ranks
        far_LE[layer, expert] /= case.ranks.num_ranks
    return near_LEG, far_LE


def expected_split(case: DispatchCase) -> Floats:
    """Return the share of each expert's token copies that each rank expects, `[L][E][G]`.

    Near replicas take their sources' tokens, far sources take any replica by equal chances. True of
    `static` over launches and of `dynamic` beside an all-to-all backend over its draws.
    """
    near_LEG, far_LE = near_and_far(case)
    return near_LEG + far_LE[:, :, None] * (case.copies_LEG / case.copies_LE[:, :, None])
