"""Largest first: copies to the largest shares, then every copy to the rank that is done first.

    L layers   E experts   G ranks   S slots of a layer

Graham's LPT rule (SIAM J. Appl. Math. 17(2), 1969) with two changes: a rank takes part only while
it has a free slot, and a copy avoids ranks that hold another copy of its expert, as long as any
other is free, because engines that invert the table need that. All layers at once, S steps of
O(L G). Proves nothing.
"""

import numpy as np

from solvers.placement.balance.replicas import listed
from solvers.placement.ranks import Floats, Ints, Ranks


def packed(cost_LE: Floats, copies_LE: Ints, ranks: Ranks, *, group_G: Ints | None = None) -> Ints:
    """Put copies on ranks, costliest first, [L][S].

    Args:
        cost_LE: of one copy.
        copies_LE: of every expert; sum to the slots in every layer.
        ranks: that hold them.
        group_G: groups of ranks, in each of which an expert has one copy as long as another group
            has a free slot; None: every rank is one.
    """
    group_G = np.arange(ranks.num_ranks) if group_G is None else group_G
    num_layers, num_ranks = len(cost_LE), ranks.num_ranks
    layers_L = np.arange(num_layers)
    expert_LS = listed(copies_LE)
    copy_cost_LS = np.take_along_axis(cost_LE, expert_LS, axis=1)
    order_LS = np.argsort(-copy_cost_LS, axis=1, kind="stable")
    expert_LS = np.take_along_axis(expert_LS, order_LS, axis=1)
    copy_cost_LS = np.take_along_axis(copy_cost_LS, order_LS, axis=1)
    work_LG = np.zeros((num_layers, num_ranks))
    held_LG = np.zeros((num_layers, num_ranks), dtype=np.int64)
    holds_LNE = np.zeros((num_layers, int(group_G.max()) + 1, cost_LE.shape[1]), dtype=bool)
    found_LS = np.empty_like(expert_LS)
    for step in range(ranks.num_slots):
        expert_L, cost_L = expert_LS[:, step], copy_cost_LS[:, step]
        done_LG = (work_LG + cost_L[:, None]) / ranks.speed_G
        twin_LG = holds_LNE[layers_L, :, expert_L][:, group_G]
        full_LG = held_LG >= ranks.slots_G
        rank_L = np.where(
            (twin_LG | full_LG).all(axis=1),
            np.where(full_LG, np.inf, done_LG).argmin(axis=1),
            np.where(full_LG | twin_LG, np.inf, done_LG).argmin(axis=1),
        )
        found_LS[layers_L, ranks.first_slot_G[rank_L] + held_LG[layers_L, rank_L]] = expert_L
        work_LG[layers_L, rank_L] += cost_L
        held_LG[layers_L, rank_L] += 1
        holds_LNE[layers_L, group_G[rank_L], expert_L] = True
    return found_LS
