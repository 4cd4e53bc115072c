"""The best split over replicas: the largest rank load of every pass and layer is least.

    P passes   L layers   E experts   G ranks
    I instances: a layer and a pass each, layer by layer
    K replicated experts of a layer   X hosts of one of them, both padded

    minimise T   so that   sum_g y(e, g) = load(e),   sum_e y(e, g) <= T * speed(g),
                           y(e, g) >= 0 only where rank g holds a replica of e

Method:  the flattest split minimises sum_g load(g)^2 / speed(g), and its largest load is T. It is
         approached by coordinate descent: one expert after another is poured anew over its hosts,
         up to a common level (water-filling), in every instance at once.
Proof:   by duality T >= load of the experts whose hosts all lie in A / speed of A, for any set A of
         ranks. The ranks above a level are tried as A: at the flattest split one of those sets
         reaches T. An instance is done when the two agree to `TOLERANCE`, or after `SWEEPS`.
Source:  the linear program is that of DeepSeek's LPLB and of SGLang's `--ep-dispatch-algorithm lp`;
         the method is ours. Engines stop their interior-point iterations early and then draw
         tokens by the fractions, so they reach T only on average.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from solvers.placement.dispatch.case import DispatchCase, split_loads
from solvers.placement.dispatch.kept import by_slot
from solvers.placement.ranks import Floats, Ints

TOLERANCE: Final = 1e-6
"""Largest relative distance of a largest load from its proven bound."""

SWEEPS: Final = 256
"""Rounds over all experts at most."""

SWEEPS_PER_CHECK: Final = 4


def slot_splits(case: DispatchCase) -> Floats:
    """Return the best share of its expert for each slot's rank in every pass, `[P][L][S]`.

    Of several best splits the flattest that is found; an expert without tokens is split evenly. A
    pass is poured until all of its layers are done, whatever the others need.
    """
    passes, layers = case.load_PLE.shape[:2]
    share_PLS = np.empty((passes, layers, case.ranks.num_slots))
    pool = _pool(case)
    pass_Q = np.arange(passes)
    for sweep in range(SWEEPS):
        _sweep(pool)
        if sweep % SWEEPS_PER_CHECK and sweep + 1 < SWEEPS:
            continue
        largest_I = (pool.load_IG / pool.speed_G)[:, :-1].max(axis=1)
        done_I = largest_I <= _bound_I(pool) * (1.0 + TOLERANCE)
        done_Q = done_I.reshape(layers, -1).all(axis=0) | (sweep + 1 == SWEEPS)
        if not done_Q.any():
            continue
        for place in np.flatnonzero(done_Q):
            one = pool.only(np.tile(np.arange(len(pass_Q)) == place, layers))
            share_PLS[pass_Q[place]] = by_slot(case, _split_of(case, one))
        pass_Q = pass_Q[~done_Q]
        if not len(pass_Q):
            break
        pool = pool.only(np.tile(~done_Q, layers))
    return share_PLS


def _split_of(case: DispatchCase, pool: "_Pool") -> Floats:
    """Return the shares of a pool of one pass, `[L][E][G]`."""
    split_LEG = np.zeros((case.num_layers, case.num_experts, case.ranks.num_ranks + 1))
    split_LEG[:, :, :-1] = case.copies_LEG / case.copies_LE[:, :, None]
    order_LE = _widest_first(case.copies_LEG > 0)
    for place, (hosts_IX, poured_IX) in enumerate(
        zip(pool.hosts_K_IX, pool.poured_K_IX, strict=True)
    ):
        layer_N = np.flatnonzero(pool.amount_IK[:, place] > 0.0)
        expert_N = order_LE[layer_N, place]
        is_host_NX = hosts_IX[layer_N] < case.ranks.num_ranks
        poured_NX = np.where(is_host_NX, poured_IX[layer_N], 0.0)
        split_LEG[layer_N, expert_N] = 0.0
        split_LEG[layer_N[:, None], expert_N[:, None], hosts_IX[layer_N]] = (
            poured_NX / poured_NX.sum(axis=1, keepdims=True)
        )
    return split_LEG[:, :, :-1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pool:
    """Instances that are not done. Rank G is padding: its load is infinite."""

    fixed_IG: Floats
    """Load of the experts that have one host."""
    load_IG: Floats
    amount_IK: Floats
    hosts_K_IX: tuple[Ints, ...]
    """Host ranks of each replicated expert in every instance, padded with G."""
    poured_K_IX: tuple[Floats, ...]
    speed_G: Floats

    def only(self, kept_I: npt.NDArray[np.bool_]) -> "_Pool":
        """Return the instances named."""
        return _Pool(
            fixed_IG=self.fixed_IG[kept_I],
            load_IG=self.load_IG[kept_I],
            amount_IK=self.amount_IK[kept_I],
            hosts_K_IX=tuple(hosts[kept_I] for hosts in self.hosts_K_IX),
            poured_K_IX=tuple(poured[kept_I] for poured in self.poured_K_IX),
            speed_G=self.speed_G,
        )


def _pool(case: DispatchCase) -> _Pool:
    """Return every instance, split evenly to begin with."""
    passes, layers, _ = case.load_PLE.shape
    ranks = case.ranks.num_ranks
    hosts_LEG = case.copies_LEG > 0
    split_LE = hosts_LEG.sum(axis=2) > 1
    fixed_PLG = split_loads(case, (hosts_LEG & ~split_LE[:, :, None]).astype(np.float64))
    fixed_IG = fixed_PLG.transpose(1, 0, 2).reshape(-1, ranks)
    order_LE = _widest_first(hosts_LEG)
    count_L = split_LE.sum(axis=1)
    amount_IK = np.zeros((layers * passes, int(count_L.max())))
    load_IG = np.concatenate((fixed_IG, np.full((len(fixed_IG), 1), np.inf)), axis=1)
    hosts_K_IX, poured_K_IX = [], []
    for place in range(amount_IK.shape[1]):
        expert_L = order_LE[:, place]
        present_L = place < count_L
        chosen_LG = hosts_LEG[np.arange(layers), expert_L] & present_L[:, None]
        width = int(chosen_LG.sum(axis=1).max())
        # Sorting puts the hosts first, by id; what follows them is padding.
        hosts_LX = np.sort(np.where(chosen_LG, np.arange(ranks), ranks), axis=1)[:, :width]
        amount_PL = case.load_PLE[:, np.arange(layers), expert_L] * present_L
        amount_I = amount_PL.T.ravel()
        share_LX = (hosts_LX < ranks) / np.maximum(chosen_LG.sum(axis=1, keepdims=True), 1)
        hosts_IX = np.repeat(hosts_LX, passes, axis=0)
        poured_IX = amount_I[:, None] * np.repeat(share_LX, passes, axis=0)
        np.add.at(load_IG, (np.arange(len(load_IG))[:, None], hosts_IX), poured_IX)
        amount_IK[:, place] = amount_I
        hosts_K_IX.append(hosts_IX)
        poured_K_IX.append(poured_IX)
    return _Pool(
        fixed_IG=fixed_IG,
        load_IG=load_IG,
        amount_IK=amount_IK,
        hosts_K_IX=tuple(hosts_K_IX),
        poured_K_IX=tuple(poured_K_IX),
        speed_G=np.append(case.ranks.speed_G, 1.0),
    )


def _widest_first(hosts_LEG: npt.NDArray[np.bool_]) -> Ints:
    """Order experts by hosts, so that the k-th of all layers have about as many."""
    return np.argsort(-hosts_LEG.sum(axis=2), axis=1, kind="stable")


def _sweep(pool: _Pool) -> None:
    """Pour every expert anew over its hosts, in place.

    The level t solves sum_x max(0, t * speed_x - others_x) = amount. With hosts sorted by
    others / speed it is the least over k of (amount + sum_{j<=k} others_j) / sum_{j<=k} speed_j.
    """
    row_I = np.arange(len(pool.load_IG))[:, None]
    for place, (hosts_IX, poured_IX) in enumerate(
        zip(pool.hosts_K_IX, pool.poured_K_IX, strict=True)
    ):
        speed_IX = pool.speed_G[hosts_IX]
        others_IX = pool.load_IG[row_I, hosts_IX] - poured_IX
        order_IX = np.argsort(others_IX / speed_IX, axis=1)
        filled_IX = np.cumsum(np.take_along_axis(others_IX, order_IX, axis=1), axis=1)
        width_IX = np.cumsum(np.take_along_axis(speed_IX, order_IX, axis=1), axis=1)
        level_I = ((pool.amount_IK[:, place, None] + filled_IX) / width_IX).min(axis=1)
        # An instance without this expert has padding only, and an infinite level.
        level_I[~np.isfinite(level_I)] = 0.0
        poured_IX[:] = np.maximum(level_I[:, None] * speed_IX - others_IX, 0.0)
        pool.load_IG[row_I, hosts_IX] = others_IX + poured_IX


def _bound_I(pool: _Pool) -> Floats:
    """Return the largest bound that a set of the most-loaded ranks proves, for each instance."""
    ranks = pool.fixed_IG.shape[1]
    order_IG = np.argsort(-(pool.load_IG / pool.speed_G)[:, :-1], axis=1, kind="stable")
    place_IG = np.full((len(order_IG), ranks + 1), -1, dtype=np.int64)
    np.put_along_axis(place_IG, order_IG, np.arange(ranks)[None, :], axis=1)
    confined_IG = np.take_along_axis(pool.fixed_IG, order_IG, axis=1)
    row_I = np.arange(len(order_IG))
    for place, hosts_IX in enumerate(pool.hosts_K_IX):
        # The expert is confined to the most-loaded ranks from its least busy host on; an absent one
        # adds nothing anywhere.
        last_I = np.take_along_axis(place_IG, hosts_IX, axis=1).max(axis=1)
        confined_IG[row_I, last_I] += pool.amount_IK[:, place]
    speed_IG = pool.speed_G[order_IG]
    bound_I: Floats = (np.cumsum(confined_IG, axis=1) / np.cumsum(speed_IG, axis=1)).max(axis=1)
    return bound_I
