"""Copies of experts, and ranks for them: next copy to the largest share, heaviest to the lightest.

    L layers   E experts   G ranks   S slots of a layer   X items

After k extra copies the largest load of a copy, max_e load_e / copies_e, is as small as k extra
copies can make it: whoever is below needs ceil(load_e / T) copies of every expert, and the rule
never gives an expert more than that before the maximum has passed T. O(extra * E) a layer.

Packing is Graham's LPT rule (SIAM J. Appl. Math. 17(2), 1969) with two changes: a rank takes part
only while it has a free slot, and a copy avoids groups of ranks that hold another copy of its
expert, as long as any other is free, because engines that invert the table need that. All layers at
once, S steps of O(L G). Both compute in the precision of the loads, and ties go to the lowest
index. Proves nothing.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from solvers.placement.ranks import Floats, Ints

UNLIMITED = int(np.iinfo(np.int64).max)

Weights = npt.NDArray[Any]
"""Numbers of double or single precision."""


def copied(
    load_LE: Weights, *, num_slots: int, most_copies: int = UNLIMITED
) -> tuple[Ints, Weights]:
    """Return experts in order, then the copies in the order given, [L][S], and every one's share.

    Args:
        load_LE: of every expert.
        num_slots: at least the number of experts.
        most_copies: an expert gets more only when every expert has as many.
    """
    num_layers, num_experts = load_LE.shape
    layers_L = np.arange(num_layers)
    copies_LE = np.ones(load_LE.shape, dtype=np.int64)
    expert_LS = np.tile(np.arange(num_slots, dtype=np.int64) % num_experts, (num_layers, 1))
    share_LE = load_LE.copy()
    for slot in range(num_experts, num_slots):
        below_L1 = share_LE.max(axis=1, keepdims=True) + 1.0
        wanted_LE = np.where(copies_LE >= most_copies, share_LE - below_L1, share_LE)
        expert_L = wanted_LE.argmax(axis=1)
        expert_LS[:, slot] = expert_L
        copies_LE[layers_L, expert_L] += 1
        share_LE[layers_L, expert_L] = np.divide(
            load_LE[layers_L, expert_L], copies_LE[layers_L, expert_L], dtype=load_LE.dtype
        )
    return expert_LS, np.take_along_axis(share_LE, expert_LS, axis=1)


def packed(
    weight_LX: Weights,
    slots_G: Ints,
    *,
    speed_G: Floats | None = None,
    expert_LX: Ints | None = None,
    group_G: Ints | None = None,
) -> Ints:
    """Return the item in every slot, rank by rank, [L][X].

    Args:
        weight_LX: of the items, one a slot.
        slots_G: of the ranks.
        speed_G: of the ranks; None: all are equal.
        expert_LX: of the items, of which a group of ranks has one as long as another group has a
            free slot; None: items are experts of their own.
        group_G: groups of ranks; None: every rank is one.
    """
    num_layers, num_items = weight_LX.shape
    layers_L = np.arange(num_layers)
    group_G = np.arange(len(slots_G)) if group_G is None else group_G
    slowness_G = 1.0 / (np.ones(len(slots_G)) if speed_G is None else speed_G)
    slowness_G = slowness_G.astype(weight_LX.dtype)
    first_slot_G = np.cumsum(slots_G) - slots_G
    order_LX = np.argsort(-weight_LX, axis=1, kind="stable")
    expert_LX = np.tile(np.arange(num_items), (num_layers, 1)) if expert_LX is None else expert_LX
    work_LG = np.zeros((num_layers, len(slots_G)), dtype=weight_LX.dtype)
    held_LG = np.zeros(work_LG.shape, dtype=np.int64)
    holds_LNE = np.zeros((num_layers, int(group_G.max()) + 1, int(expert_LX.max()) + 1), dtype=bool)
    item_LX = np.empty_like(order_LX)
    for item_L in order_LX.T:
        expert_L, weight_L = expert_LX[layers_L, item_L], weight_LX[layers_L, item_L]
        # When each would be done, less what is the same for all: exact where speeds are equal.
        done_LG = work_LG * slowness_G + weight_L[:, None] * (slowness_G - slowness_G.min())
        is_twin_LG = holds_LNE[layers_L, :, expert_L][:, group_G]
        is_full_LG = held_LG >= slots_G
        is_twin_LG &= ~(is_twin_LG | is_full_LG).all(axis=1, keepdims=True)
        rank_L = np.where(is_full_LG | is_twin_LG, np.inf, done_LG).argmin(axis=1)
        item_LX[layers_L, first_slot_G[rank_L] + held_LG[layers_L, rank_L]] = item_L
        work_LG[layers_L, rank_L] += weight_L
        held_LG[layers_L, rank_L] += 1
        holds_LNE[layers_L, group_G[rank_L], expert_L] = True
    return item_LX


def least_choices(size_CX: Ints, value_CX: Floats, *, limit: int) -> Ints:
    """Return one of C choices an item: the least sum of values, of sizes up to the limit, [X].

    A multiple-choice knapsack, exact by dynamic programming over B = limit sizes, O(X C B).
    """
    value_B = np.zeros(limit + 1)
    taken_XB = np.empty((size_CX.shape[1], limit + 1), dtype=np.int64)
    for size_C, value_C, taken_B in zip(size_CX.T, value_CX.T, taken_XB, strict=True):
        with_CB = np.full((len(size_C), limit + 1), np.inf)
        for with_B, size, value in zip(with_CB, size_C.tolist(), value_C.tolist(), strict=True):
            with_B[size:] = value_B[: max(0, limit + 1 - size)] + value
        taken_B[:] = with_CB.argmin(axis=0)
        value_B = with_CB.min(axis=0)
    choice_X = np.empty(len(taken_XB), dtype=np.int64)
    for item in reversed(range(len(taken_XB))):
        choice_X[item] = taken_XB[item, limit]
        limit -= int(size_CX[choice_X[item], item])
    return choice_X
