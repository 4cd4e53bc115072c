"""The best split over replicas: the largest rank load of every pass and layer is least.

    P passes   L layers   E experts   G ranks   S slots
    K replicated experts of a layer, by falling number of hosts   X hosts of one of them
    O passes that are not done

    minimise T   so that   sum_g y(e, g) = load(e),   sum_e y(e, g) <= T * speed(g),
                           y(e, g) >= 0 only where rank g holds a replica of e

Method:  the flattest split minimises sum_g load(g)^2 / speed(g), and its largest load is T. It is
         approached by coordinate descent: one expert after another is poured anew over its hosts,
         up to a common level (water-filling), in every pass and layer at once. Absent experts and
         hosts are padding: they stand on rank G, whose load is infinite.
Proof:   by duality T >= load of the experts whose hosts all lie in A / speed of A, for any set A of
         ranks. The ranks above a level are tried as A: at the flattest split one of those sets
         reaches T. A pass is done when the two agree to `TOLERANCE` in all layers, or after
         `SWEEPS`.
Source:  the linear program is that of DeepSeek's LPLB and of SGLang's `--ep-dispatch-algorithm lp`;
         the method is ours. Engines stop their interior-point iterations early and then draw
         tokens by the fractions, so they reach T only on average.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.ranks import Floats, Ints

TOLERANCE: Final = 1e-6
"""Largest relative distance of a largest load from its proven bound."""

SWEEPS: Final = 256
"""Rounds over all experts at most."""

SWEEPS_PER_CHECK: Final = 4


def slot_splits(case: DispatchCase) -> Floats:
    """Return the best share of its expert for each slot in every pass, `[P][L][S]`.

    Of several best splits the flattest that is found; an expert without tokens is split evenly. A
    pass is poured until all of its layers are done, whatever the others need.
    """
    ranks, row_L1 = case.ranks.num_ranks, np.arange(case.num_layers)[:, None]
    is_host_LEG = case.copies_LEG > 0
    hosts_LE = is_host_LEG.sum(axis=2)
    order_LE = np.argsort(-hosts_LE, axis=1, kind="stable")
    expert_LK = order_LE[:, : int((hosts_LE > 1).sum(axis=1).max())]
    is_split_LK = hosts_LE[row_L1, expert_LK] > 1
    is_host_LKG = is_host_LEG[row_L1, expert_LK] & is_split_LK[:, :, None]
    # Sorting puts the hosts first, by id; what follows them is padding.
    width_K = is_host_LKG.sum(axis=2).max(axis=0)
    host_LKX = np.sort(np.where(is_host_LKG, np.arange(ranks), ranks), axis=2)
    host_LKX = host_LKX[:, :, : int(width_K.max(initial=1))]
    amount_OLK = case.load_PLE[:, row_L1, expert_LK] * is_split_LK
    is_fixed_LEG = is_host_LEG & (hosts_LE == 1)[:, :, None]
    fixed_OLG = np.einsum("ple,leg->plg", case.load_PLE, is_fixed_LEG.astype(np.float64))
    load_OLG = np.concatenate((fixed_OLG, np.full((*fixed_OLG.shape[:2], 1), np.inf)), axis=2)
    poured_OLKX = np.zeros((*amount_OLK.shape, host_LKX.shape[2]))
    speed_G = np.append(case.ranks.speed_G, 1.0)
    share_PLS = np.empty((len(case.load_PLE), *case.placement.expert_LS.shape))
    pass_O = np.arange(len(case.load_PLE))
    for sweep in range(SWEEPS):
        for place, width in enumerate(width_K.tolist()):
            hosts_LX = host_LKX[:, place, :width]
            poured_OLX = poured_OLKX[:, :, place, :width]
            others_OLX = load_OLG[:, row_L1, hosts_LX] - poured_OLX
            poured_OLX[:] = _filled(amount_OLK[:, :, place], others_OLX, speed_G[hosts_LX])
            load_OLG[:, row_L1, hosts_LX] = others_OLX + poured_OLX
        if sweep % SWEEPS_PER_CHECK and sweep + 1 < SWEEPS:
            continue
        largest_OL = (load_OLG / speed_G)[:, :, :-1].max(axis=2)
        least_OL = _bounds(load_OLG, fixed_OLG, amount_OLK, host_LKX, speed_G)
        is_done_O = (largest_OL <= least_OL * (1.0 + TOLERANCE)).all(axis=1) | (sweep + 1 == SWEEPS)
        for place in np.flatnonzero(is_done_O).tolist():
            share_PLS[pass_O[place]] = _by_slot(case, expert_LK, host_LKX, poured_OLKX[place])
        pass_O, amount_OLK, fixed_OLG, load_OLG, poured_OLKX = (
            of_O[~is_done_O] for of_O in (pass_O, amount_OLK, fixed_OLG, load_OLG, poured_OLKX)
        )
        if not len(pass_O):
            break
    return share_PLS


def _filled(amount_OL: Floats, others_OLX: Floats, speed_LX: Floats) -> Floats:
    """Pour an amount over hosts up to a common level.

    The level t solves sum_x max(0, t * speed_x - others_x) = amount. With hosts sorted by
    others / speed it is the least over k of (amount + sum_{j<=k} others_j) / sum_{j<=k} speed_j.
    """
    order_OLX = np.argsort(others_OLX / speed_LX, axis=2)
    filled_OLX = np.take_along_axis(others_OLX, order_OLX, axis=2).cumsum(axis=2)
    width_OLX = speed_LX[np.arange(len(speed_LX))[:, None], order_OLX].cumsum(axis=2)
    level_OL = ((amount_OL[:, :, None] + filled_OLX) / width_OLX).min(axis=2)
    # An absent expert has padding only, and an infinite level.
    level_OL[~np.isfinite(level_OL)] = 0.0
    return np.asarray(np.maximum(level_OL[:, :, None] * speed_LX - others_OLX, 0.0))


def _bounds(
    load_OLG: Floats, fixed_OLG: Floats, amount_OLK: Floats, host_LKX: Ints, speed_G: Floats
) -> Floats:
    """Return the largest bound that a set of the most-loaded ranks proves, `[O][L]`."""
    passes, layers, ranks = fixed_OLG.shape
    order_OLG = np.argsort(-(load_OLG / speed_G)[:, :, :-1], axis=2, kind="stable")
    place_OLG = np.full(load_OLG.shape, -1, dtype=np.int64)
    np.put_along_axis(place_OLG, order_OLG, np.arange(ranks)[None, None], axis=2)
    confined_OLG = np.take_along_axis(fixed_OLG, order_OLG, axis=2)
    # An expert is confined to the most-loaded ranks from its least busy host on; an absent one
    # adds nothing anywhere.
    last_OLK = place_OLG[:, np.arange(layers)[:, None, None], host_LKX].max(axis=3)
    row_O11, row_L1 = np.arange(passes)[:, None, None], np.arange(layers)[:, None]
    np.add.at(confined_OLG, (row_O11, row_L1, last_OLK), amount_OLK)
    speed_OLG = speed_G[order_OLG]
    return np.asarray((confined_OLG.cumsum(axis=2) / speed_OLG.cumsum(axis=2)).max(axis=2))


def _by_slot(
    case: DispatchCase, expert_LK: Ints, host_LKX: Ints, poured_LKX: npt.NDArray[np.float64]
) -> Floats:
    """Return the shares of slots, `[L][S]`; two of one expert on a rank take half of its each."""
    copies_LEG = case.copies_LEG
    split_LEG = np.zeros((case.num_layers, case.num_experts, case.ranks.num_ranks + 1))
    split_LEG[:, :, :-1] = copies_LEG / case.copies_LE[:, :, None]
    total_LK = poured_LKX.sum(axis=2)
    layer_N, place_N = np.nonzero(total_LK > 0.0)
    expert_N = expert_LK[layer_N, place_N]
    split_LEG[layer_N, expert_N] = 0.0
    split_LEG[layer_N[:, None], expert_N[:, None], host_LKX[layer_N, place_N]] = (
        poured_LKX[layer_N, place_N] / total_LK[layer_N, place_N, None]
    )
    slots = (np.arange(case.num_layers)[:, None], case.placement.expert_LS, case.ranks.rank_S)
    return np.asarray(split_LEG[slots] / copies_LEG[slots])
