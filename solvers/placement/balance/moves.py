"""The best change of a layer: swap two experts, or give a slot to another expert.

    N chosen layers   W workloads   G ranks   K slots of one rank   S slots   C candidates
    M moments of times (`state.py`)

Moves are evaluated by the potential of a layer,

    sum_w weight_w sum_g max(0, peak_wg - limit_w) ** 2,

which penalises every rank of every workload above a limit slightly above the bound: unlike the
largest time it distinguishes two moves that both leave the most-loaded rank unchanged.

 - swap: any slot of the given rank with any slot of another, K * S of them, all evaluated
 - overwrite: C random ones; a slot of an expert with a spare copy gets an expert of the given rank
   (which then carries less there), or a slot of the given rank with a spare copy gets any expert
"""

import numpy as np
import numpy.typing as npt

from solvers.placement.balance.state import Singles, State
from solvers.placement.ranks import Floats, Ints

FORBIDDEN = np.float32(np.inf)


Moves = tuple[Ints, Ints, Singles]
"""The best move of each chosen layer: a slot; the other slot of a swap, or the new expert of an
overwrite; and the change of the potential, negative improves, infinite where none is allowed."""


def best_swap(
    state: State,
    chosen_N: Ints,
    rank_N: Ints,
    *,
    limit_NW: Singles,
    weight_W: Singles,
    step: int,
) -> Moves:
    """Return the swap with the least potential among all that involve the given rank."""
    ranks, row_N = state.problem.ranks, np.arange(len(chosen_N))
    place_K = np.arange(int(ranks.slots_G.max()))
    # Where ranks differ in slots, the first one stands in for those that are missing.
    is_slot_NK = place_K < ranks.slots_G[rank_N][:, None]
    slot_NK = ranks.first_slot_G[rank_N][:, None] + np.where(is_slot_NK, place_K, 0)
    # The root of the weight goes into the times, as into both factors of the square.
    root_W11 = np.sqrt(weight_W)[:, None, None]
    limit_NW1 = limit_NW[:, :, None] * root_W11[:, 0]
    here_M, there_M, before_M = [], [], []
    for moment, (slot_LWS, rank_LWG) in enumerate(
        zip(state.slot_MLWS, state.rank_MLWG, strict=True), start=1
    ):
        inverse_G = (ranks.speed_G**-moment).astype(np.float32)
        slot_NWS = slot_LWS[chosen_N] * root_W11[:, 0] ** moment
        rank_NWG = rank_LWG[chosen_N] * root_W11[:, 0] ** moment
        if moment == 1:
            rank_NWG -= limit_NW1
        before_M.append(rank_NWG)
        mine_NWK = np.take_along_axis(slot_NWS, slot_NK[:, None, :], axis=2)
        gain_NWKS = mine_NWK[:, :, :, None] - slot_NWS[:, :, None, :]
        here_NW11 = rank_NWG[row_N, :, rank_N][:, :, None, None]
        here_M.append(here_NW11 - gain_NWKS * inverse_G[rank_N][:, None, None, None])
        gain_NWKS *= inverse_G[ranks.rank_S]
        gain_NWKS += rank_NWG[:, :, None, :].take(ranks.rank_S, axis=3)
        there_M.append(gain_NWKS)
    here_NWKS, there_NWKS = state.peak(here_M), state.peak(there_M)
    for over_NWKS in (here_NWKS, there_NWKS):
        np.maximum(over_NWKS, 0.0, out=over_NWKS)
        np.multiply(over_NWKS, over_NWKS, out=over_NWKS)
    here_NWKS += there_NWKS
    change_NKS = here_NWKS.sum(axis=1)
    before_NG = np.square(np.maximum(state.peak(before_M), 0.0)).sum(axis=1)
    change_NKS -= before_NG.take(ranks.rank_S, axis=1)[:, None, :]
    change_NKS[~_may_swap(state, chosen_N, rank_N, slot_NK, step)] = FORBIDDEN
    best_N = change_NKS.reshape(len(chosen_N), -1).argmin(axis=1)
    place_N, partner_N = np.divmod(best_N, ranks.num_slots)
    change_N = change_NKS[row_N, place_N, partner_N] - before_NG[row_N, rank_N]
    return slot_NK[row_N, place_N], partner_N, change_N


def best_overwrite(
    state: State,
    chosen_N: Ints,
    rank_N: Ints,
    *,
    limit_NW: Singles,
    weight_W: Singles,
    draw_C3: Floats,
) -> Moves:
    """Return the overwrite with the least potential among the candidates drawn.

    Args:
        state: of which layers are improved.
        chosen_N: those layers.
        rank_N: the rank that is to have less to do.
        limit_NW: of the potential.
        weight_W: of the potential.
        draw_C3: three uniform numbers in [0, 1) a candidate, the same for every layer.
    """
    ranks, row_N1 = state.problem.ranks, np.arange(len(chosen_N))[:, None]
    expert_NS, copies_NE = state.expert_LS[chosen_N], state.copies_LE[chosen_N]
    place_NC = (draw_C3[:, 0] * ranks.slots_G[rank_N][:, None]).astype(np.int64)
    here_NC = ranks.first_slot_G[rank_N][:, None] + place_NC
    is_spare_NS = copies_NE[row_N1, expert_NS] >= 2
    spare_first_NS = np.argsort(~is_spare_NS, axis=1, kind="stable")
    place_NC = (draw_C3[:, 1] * is_spare_NS.sum(axis=1, keepdims=True)).astype(np.int64)
    is_here_C = np.arange(len(draw_C3)) % 2 == 1
    slot_NC = np.where(is_here_C, here_NC, spare_first_NS[row_N1, place_NC])
    any_C = (draw_C3[:, 2] * state.problem.num_experts).astype(np.int64)
    expert_NC = np.where(is_here_C, any_C, expert_NS[row_N1, here_NC])
    rank_NC, gone_NC = ranks.rank_S[slot_NC], expert_NS[row_N1, slot_NC]
    holds_NCG, gives_NCG = (
        np.add.reduceat(
            (expert_NS[:, None, :] == of_NC[:, :, None]).astype(np.float32),
            ranks.first_slot_G,
            axis=2,
        )[:, :, None, :]
        for of_NC in (expert_NC, gone_NC)
    )
    after_M = []
    for moment, rank_LWG in enumerate(state.rank_MLWG):
        now_NWE, more_NWE, less_NWE = (
            state.of_copies(moment, chosen_N, count_NE)
            for count_NE in (copies_NE, copies_NE + 1, np.maximum(copies_NE - 1, 1))
        )
        rises_NCW = (less_NWE - now_NWE)[row_N1, :, gone_NC]
        falls_NCW = (more_NWE - now_NWE)[row_N1, :, expert_NC]
        arrives_NCW = more_NWE[row_N1, :, expert_NC] - less_NWE[row_N1, :, gone_NC]
        work_NCWG = rises_NCW[..., None] * gives_NCG + falls_NCW[..., None] * holds_NCG
        work_NCWG[row_N1, np.arange(rank_NC.shape[1]), :, rank_NC] += arrives_NCW
        work_NCWG *= (ranks.speed_G ** -(moment + 1.0)).astype(np.float32)
        after_M.append(work_NCWG + rank_LWG[chosen_N][:, None])
    limit_NW1 = limit_NW[:, :, None]
    over_NWG = np.maximum(state.peak_NWG(chosen_N) - limit_NW1, 0.0)
    over_NCWG = np.maximum(state.peak(after_M) - limit_NW1[:, None], 0.0)
    change_NC = np.square(over_NCWG).sum(axis=3) @ weight_W
    change_NC -= (np.square(over_NWG).sum(axis=2) @ weight_W)[:, None]
    is_new_NC = state.held_LNE[chosen_N[:, None], state.group_G[rank_NC], expert_NC] == 0
    change_NC[~(is_spare_NS[row_N1, slot_NC] & is_new_NC)] = FORBIDDEN
    best_N = change_NC.argmin(axis=1)
    row_N = row_N1[:, 0]
    return slot_NC[row_N, best_N], expert_NC[row_N, best_N], change_NC[row_N, best_N]


def _may_swap(
    state: State, chosen_N: Ints, rank_N: Ints, slot_NK: Ints, step: int
) -> npt.NDArray[np.bool_]:
    """Return whether both experts may enter the other's rank; never for slots of one rank.

    An expert may go where its group has no other copy of it; its own one leaves.
    """
    rank_S, group_G = state.problem.ranks.rank_S, state.group_G
    layer_N1, rank_N1, layer_N11 = chosen_N[:, None], rank_N[:, None], chosen_N[:, None, None]
    expert_NS = state.expert_LS[chosen_N]
    expert_NK1 = np.take_along_axis(expert_NS, slot_NK, axis=1)[:, :, None]
    enters_NS = state.until_LGE[layer_N1, rank_N1, expert_NS] <= step
    leaves_NKG = state.until_LGE[layer_N11, np.arange(len(group_G)), expert_NK1] <= step
    if state.problem.dispatch.is_near:
        is_beside_NG = group_G == group_G[rank_N1]
        held_NS = state.held_LNE[layer_N1, group_G[rank_N1], expert_NS]
        enters_NS &= held_NS <= is_beside_NG[:, rank_S]
        leaves_NKG &= state.held_LNE[layer_N11, group_G, expert_NK1] <= is_beside_NG[:, None]
    return np.asarray(leaves_NKG.take(rank_S, axis=2) & enters_NS[:, None, :])
