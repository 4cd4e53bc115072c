"""The best change of a layer: swap two experts, or give a slot to another expert.

    N chosen layers   W workloads   G ranks   K slots of one rank   S slots   C candidates

Moves are evaluated by the potential of a layer,

    sum_w weight_w sum_g max(0, time_wg - limit_w) ** 2,

which penalises every rank of every workload above a limit slightly above the bound: unlike the
largest time it distinguishes two moves that both leave the most-loaded rank unchanged.

 - swap: any slot of the given rank with any slot of another, K * S of them, all evaluated
 - overwrite: C random ones; a slot of an expert with a spare copy gets an expert of the given rank
   (which then carries less there), or a slot of the given rank with a spare copy gets any expert
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.placement.balance.state import Noise, Singles, State
from solvers.placement.ranks import Floats, Ints

FORBIDDEN = np.float32(np.inf)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """The best move of each chosen layer; `change_N` is infinite where none is allowed."""

    slot_N: Ints
    partner_N: Ints
    """The other slot of a swap, the new expert of an overwrite."""
    change_N: Floats
    """Change of the potential by the move; negative improves."""


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
    ranks = state.problem.ranks
    rank_S, num_layers = ranks.rank_S, len(chosen_N)
    inverse_G = (1.0 / ranks.speed_G).astype(np.float32)
    slot_NK, is_slot_NK = _slots_of(state, rank_N)
    cost_NWS, expert_NS = state.cost_LWS[chosen_N], state.expert_LS[chosen_N]
    # The square root of the weight goes into both factors of the square.
    root_W = np.sqrt(weight_W)[None, :, None]
    over_NWG = (state.time_LWG[chosen_N] - limit_NW[:, :, None]) * root_W
    cost_NWS = cost_NWS * root_W
    cost_NWK = np.take_along_axis(cost_NWS, slot_NK[:, None, :].repeat(len(weight_W), 1), axis=2)
    gain_NWKS = cost_NWK[:, :, :, None] - cost_NWS[:, :, None, :]
    over_here_NW = over_NWG[np.arange(num_layers), :, rank_N]
    here_NWKS = over_here_NW[:, :, None, None] - gain_NWKS * inverse_G[rank_N][:, None, None, None]
    gain_NWKS *= inverse_G[rank_S]
    gain_NWKS += over_NWG[:, :, None, :].take(rank_S, axis=3)
    if state.noise is not None:
        more_here_NWKS, more_there_NWKS = _cautions(state, state.noise, chosen_N, rank_N, slot_NK)
        here_NWKS += more_here_NWKS * root_W[..., None]
        gain_NWKS += more_there_NWKS * root_W[..., None]
        peak_NWG = state.peak_NWG(chosen_N)
        over_NWG = (peak_NWG - limit_NW[:, :, None]) * root_W
    for over_NWKS in (here_NWKS, gain_NWKS):
        np.maximum(over_NWKS, 0.0, out=over_NWKS)
        np.multiply(over_NWKS, over_NWKS, out=over_NWKS)
    here_NWKS += gain_NWKS
    value_NKS = here_NWKS.sum(axis=1)
    before_NG = np.square(np.maximum(over_NWG, 0.0)).sum(axis=1)
    value_NKS -= before_NG.take(rank_S, axis=1)[:, None, :]
    value_NKS[~_may_swap(state, chosen_N, rank_N, slot_NK, is_slot_NK, expert_NS, step)] = FORBIDDEN
    best_N = value_NKS.reshape(num_layers, -1).argmin(axis=1)
    place_N, partner_N = np.divmod(best_N, ranks.num_slots)
    row_N = np.arange(num_layers)
    change_N = value_NKS[row_N, place_N, partner_N] - before_NG[row_N, rank_N]
    return Moves(
        slot_N=slot_NK[row_N, place_N],
        partner_N=partner_N,
        change_N=change_N.astype(np.float64),
    )


def best_overwrite(
    state: State,
    chosen_N: Ints,
    rank_N: Ints,
    *,
    limit_NW: Singles,
    weight_W: Singles,
    draw_CX: Floats,
) -> Moves:
    """Return the overwrite with the least potential among the candidates drawn.

    Args:
        state: of which layers are improved.
        chosen_N: those layers.
        rank_N: the rank that is to have less to do.
        limit_NW: of the potential.
        weight_W: of the potential.
        draw_CX: three uniform numbers in [0, 1) a candidate, the same for every layer.
    """
    slot_NC, expert_NC = _drawn(state, chosen_N, rank_N, draw_CX)
    row_N1, rank_NC = np.arange(len(chosen_N))[:, None], state.problem.ranks.rank_S[slot_NC]
    layer_N1 = chosen_N[:, None]
    gone_NC = state.expert_LS[layer_N1, slot_NC]
    copies_NE = state.copies_LE[chosen_N]
    now_NWE = state.cost_of_copies(chosen_N, copies_NE)
    more_NWE = state.cost_of_copies(chosen_N, copies_NE + 1)
    less_NWE = state.cost_of_copies(chosen_N, np.maximum(copies_NE - 1, 1))
    rises_NCW = (less_NWE - now_NWE)[row_N1, :, gone_NC]
    falls_NCW = (more_NWE - now_NWE)[row_N1, :, expert_NC]
    arrives_NCW = more_NWE[row_N1, :, expert_NC] - less_NWE[row_N1, :, gone_NC]
    held_NCG = state.held_LGE[layer_N1, :, gone_NC].astype(np.float32)
    holds_NCG = state.held_LGE[layer_N1, :, expert_NC].astype(np.float32)
    work_NCWG = rises_NCW[..., None].astype(np.float32) * held_NCG[:, :, None, :]
    work_NCWG += falls_NCW[..., None].astype(np.float32) * holds_NCG[:, :, None, :]
    column_1C = np.arange(rank_NC.shape[1])[None, :]
    work_NCWG[row_N1, column_1C, :, rank_NC] += arrives_NCW
    work_NCWG /= state.problem.ranks.speed_G.astype(np.float32)
    over_NWG = state.time_LWG[chosen_N] - limit_NW[:, :, None]
    work_NCWG += over_NWG[:, None]
    if state.noise is not None:
        work_NCWG += _cautions_of_copies(state, state.noise, chosen_N, slot_NC, expert_NC)
        over_NWG = state.peak_NWG(chosen_N) - limit_NW[:, :, None]
    before_N = np.square(np.maximum(over_NWG, 0.0)).sum(axis=2) @ weight_W
    after_NC = np.square(np.maximum(work_NCWG, 0.0)).sum(axis=3) @ weight_W
    change_NC = (after_NC - before_N[:, None]).astype(np.float64)
    is_spare_NC = copies_NE[row_N1, gone_NC] >= 2
    is_new_NC = state.held_LGE[layer_N1, rank_NC, expert_NC] == 0
    if state.noise is not None:
        group_NC = state.group_G[rank_NC]
        is_new_NC &= state.noise.held_LNE[layer_N1, group_NC, expert_NC] == 0
    change_NC[~(is_spare_NC & is_new_NC & (gone_NC != expert_NC))] = np.inf
    best_N = change_NC.argmin(axis=1)
    row_N = row_N1[:, 0]
    return Moves(
        slot_N=slot_NC[row_N, best_N],
        partner_N=expert_NC[row_N, best_N],
        change_N=change_NC[row_N, best_N],
    )


def _cautions(
    state: State, noise: Noise, chosen_N: Ints, rank_N: Ints, slot_NK: Ints
) -> tuple[Singles, Singles]:
    """Return the deviations, times caution, of both ranks after each swap, [N][W][K][S]."""
    ranks = state.problem.ranks
    inverse_G = (1.0 / np.square(ranks.speed_G)).astype(np.float32)
    slot_NWS, rank_NWG = noise.slot_LWS[chosen_N], noise.rank_LWG[chosen_N]
    mine_NWK = np.take_along_axis(
        slot_NWS, slot_NK[:, None, :].repeat(slot_NWS.shape[1], 1), axis=2
    )
    gain_NWKS = mine_NWK[:, :, :, None] - slot_NWS[:, :, None, :]
    here_NW = rank_NWG[np.arange(len(chosen_N)), :, rank_N]
    here_NWKS = here_NW[:, :, None, None] - gain_NWKS * inverse_G[rank_N][:, None, None, None]
    gain_NWKS *= inverse_G[ranks.rank_S]
    gain_NWKS += rank_NWG[:, :, None, :].take(ranks.rank_S, axis=3)
    for variance_NWKS in (here_NWKS, gain_NWKS):
        np.maximum(variance_NWKS, 0.0, out=variance_NWKS)
        np.sqrt(variance_NWKS, out=variance_NWKS)
        np.multiply(variance_NWKS, noise.caution, out=variance_NWKS)
    return here_NWKS, gain_NWKS


def _cautions_of_copies(
    state: State, noise: Noise, chosen_N: Ints, slot_NC: Ints, expert_NC: Ints
) -> Singles:
    """Return the deviations, times caution, of all ranks after each overwrite, [N][C][W][G]."""
    ranks, row_N1, layer_N1 = (
        state.problem.ranks,
        np.arange(len(chosen_N))[:, None],
        chosen_N[:, None],
    )
    gone_NC, copies_NE = state.expert_LS[layer_N1, slot_NC], state.copies_LE[chosen_N]
    now_NWE, more_NWE, less_NWE = (
        state.noise_of_copies(chosen_N, count_NE).astype(np.float32)
        for count_NE in (copies_NE, copies_NE + 1, np.maximum(copies_NE - 1, 1))
    )
    rises_NCW = (less_NWE - now_NWE)[row_N1, :, gone_NC]
    falls_NCW = (more_NWE - now_NWE)[row_N1, :, expert_NC]
    arrives_NCW = more_NWE[row_N1, :, expert_NC] - less_NWE[row_N1, :, gone_NC]
    held_NCG = state.held_LGE[layer_N1, :, gone_NC].astype(np.float32)
    holds_NCG = state.held_LGE[layer_N1, :, expert_NC].astype(np.float32)
    variance_NCWG = rises_NCW[..., None] * held_NCG[:, :, None, :]
    variance_NCWG += falls_NCW[..., None] * holds_NCG[:, :, None, :]
    column_1C = np.arange(slot_NC.shape[1])[None, :]
    variance_NCWG[row_N1, column_1C, :, ranks.rank_S[slot_NC]] += arrives_NCW
    variance_NCWG /= np.square(ranks.speed_G).astype(np.float32)
    variance_NCWG += noise.rank_LWG[chosen_N][:, None]
    return noise.peak(np.zeros_like(variance_NCWG), variance_NCWG)


def _slots_of(state: State, rank_N: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Slots of one rank a layer, [N][K], and which of the K it has."""
    ranks = state.problem.ranks
    place_K = np.arange(int(ranks.slots_G.max()))
    slot_NK = ranks.first_slot_G[rank_N][:, None] + place_K
    is_slot_NK = place_K < ranks.slots_G[rank_N][:, None]
    return np.where(is_slot_NK, slot_NK, ranks.first_slot_G[rank_N][:, None]), is_slot_NK


def _may_swap(
    state: State,
    chosen_N: Ints,
    rank_N: Ints,
    slot_NK: Ints,
    is_slot_NK: npt.NDArray[np.bool_],
    expert_NS: Ints,
    step: int,
) -> npt.NDArray[np.bool_]:
    """Return whether both experts may enter the other's rank; never for slots of one rank."""
    rank_S, num_ranks = state.problem.ranks.rank_S, state.problem.ranks.num_ranks
    enters_NS = state.until_LGE[chosen_N[:, None], rank_N[:, None], expert_NS] <= step
    expert_NK = np.take_along_axis(expert_NS, slot_NK, axis=1)
    leaves_NKG = (
        state.until_LGE[chosen_N[:, None, None], np.arange(num_ranks), expert_NK[:, :, None]]
        <= step
    )
    leaves_NKG &= is_slot_NK[:, :, None]
    if state.noise is not None:
        # An expert may go where its group has no other copy of it; its own one leaves.
        held_LNE, group_N1 = state.noise.held_LNE, state.group_G[rank_N][:, None]
        stays_NS = state.group_G[rank_S] == group_N1
        enters_NS &= held_LNE[chosen_N[:, None], group_N1, expert_NS] <= stays_NS
        stays_N1G = (state.group_G == group_N1)[:, None, :]
        held_NKG = held_LNE[chosen_N[:, None, None], state.group_G, expert_NK[:, :, None]]
        leaves_NKG &= held_NKG <= stays_N1G
    return np.asarray(leaves_NKG.take(rank_S, axis=2) & enters_NS[:, None, :])


def _drawn(state: State, chosen_N: Ints, rank_N: Ints, draw_CX: Floats) -> tuple[Ints, Ints]:
    """Slots and the experts that they would get, [N][C]; half of each kind."""
    ranks = state.problem.ranks
    first_N1, slots_N1 = ranks.first_slot_G[rank_N][:, None], ranks.slots_G[rank_N][:, None]
    here_NC = first_N1 + (draw_CX[:, 0] * slots_N1).astype(np.int64)
    layer_N1 = chosen_N[:, None]
    expert_NS = state.expert_LS[chosen_N]
    is_spare_NS = state.copies_LE[layer_N1, expert_NS] >= 2
    order_NS = np.argsort(~is_spare_NS, axis=1, kind="stable")
    num_spare_N1 = np.maximum(is_spare_NS.sum(axis=1, keepdims=True), 1)
    there_NC = np.take_along_axis(order_NS, (draw_CX[:, 1] * num_spare_N1).astype(np.int64), axis=1)
    any_1C = (draw_CX[:, 2] * state.problem.num_experts).astype(np.int64)[None, :]
    is_first_kind_1C = (np.arange(len(draw_CX)) % 2 == 0)[None, :]
    slot_NC = np.where(is_first_kind_1C, there_NC, here_NC)
    expert_NC = np.where(is_first_kind_1C, state.expert_LS[layer_N1, here_NC], any_1C)
    return slot_NC, expert_NC
