"""Least-loaded dispatch: the excess of a rank goes, weights and tokens, to less loaded ranks.

    P passes   L layers   E experts   G ranks   I instances, a pass and layer each

    gate    largest rank load < gate_ratio * mean: plain expert parallelism
    cap     capacity_ratio * mean rank load
    plan    experts by falling load; each stays home as far as the cap allows, counting what home
            has yet to take of its own; the rest goes to the least loaded other rank with room, in
            pieces of at least `min_chunk_tokens` unless the rest is smaller; with room nowhere, all
            of the rest goes to the least loaded other rank

Source:  LLEP, arXiv 2601.17111, algorithm LLA; defaults of its experiments. The gate compares rank
         loads, as its code does; the paper's text compares expert loads.
Valid:   one replica an expert: copies are made on the fly, not kept. Ranks are taken as equal.
Not covered: the time that tokens and weights take to move; weights are counted, rank by rank.
"""

from dataclasses import dataclass

import numpy as np

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.ranks import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastLoaded:
    """The knobs of the rule."""

    capacity_ratio: float = 1.0
    """alpha: tokens that a rank should take, over the mean."""
    min_chunk_tokens: float = 1024.0
    """m: smallest piece worth copying an expert's weights for."""
    gate_ratio: float = 1.3
    """lambda: largest over mean rank load below which nothing is moved."""

    def __post_init__(self) -> None:
        if not self.capacity_ratio >= 1.0:
            raise ValueError(
                f"capacity_ratio {self.capacity_ratio} is below 1: no plan can keep it"
            )
        if not (self.min_chunk_tokens >= 0.0 and self.gate_ratio >= 0.0):
            raise ValueError("min_chunk_tokens and gate_ratio must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeastLoadedPlan:
    """Loads and weight transfers of least-loaded dispatch, for every pass and layer."""

    load_PLG: Floats
    active_PLG: Ints
    """Experts that a rank computes any tokens of."""
    sent_PLG: Ints
    """Experts whose weights a rank sends, once for each that gets them."""
    received_PLG: Ints
    """Experts whose weights a rank gets."""


def plan(case: DispatchCase, *, knobs: LeastLoaded) -> LeastLoadedPlan:
    """Plan every pass and layer.

    Raises:
        ValueError: an expert has several replicas.
    """
    if case.ranks.num_slots != case.num_experts:
        raise ValueError(
            f"least-loaded dispatch copies experts itself: {case.ranks.num_slots} slots for"
            f" {case.num_experts} experts, give it one slot an expert"
        )
    passes, layers, experts = case.load_PLE.shape
    load_IE = case.load_PLE.reshape(-1, experts)
    home_IE = np.tile(np.argmax(case.copies_LEG, axis=2), (passes, 1))
    order_IE = np.argsort(-load_IE, axis=1, kind="stable")
    row_I = np.arange(len(load_IE))
    # Given to the rank so far; at home on the rank and not yet given away or taken.
    taken_IG = np.zeros((len(load_IE), case.ranks.num_ranks))
    pending_IG = np.zeros_like(taken_IG)
    np.add.at(pending_IG, (row_I[:, None], home_IE), load_IE)
    mean_I = pending_IG.mean(axis=1)
    is_gated_I = pending_IG.max(axis=1) < knobs.gate_ratio * mean_I
    cap_I = np.where(is_gated_I, np.inf, knobs.capacity_ratio * mean_I)
    active_IG, sent_IG, received_IG = (np.zeros_like(taken_IG, dtype=np.int64) for _ in range(3))
    for expert_I in order_IE.T:
        home_I, rest_I = home_IE[row_I, expert_I], load_IE[row_I, expert_I]
        pending_IG[row_I, home_I] -= rest_I
        used_I = taken_IG[row_I, home_I] + pending_IG[row_I, home_I]
        kept_I = np.clip(cap_I - used_I, 0.0, rest_I)
        taken_IG[row_I, home_I] += kept_I
        active_IG[row_I, home_I] += kept_I > 0.0
        rest_I = rest_I - kept_I
        is_copied_IG = np.zeros(taken_IG.shape, dtype=np.bool_)
        while len(open_N := np.flatnonzero(rest_I > 0.0)):
            row_N = np.arange(len(open_N))
            used_NG = taken_IG[open_N] + pending_IG[open_N]
            used_NG[row_N, home_I[open_N]] = np.inf
            rest_N1 = rest_I[open_N, None]
            piece_NG = np.minimum(rest_N1, cap_I[open_N, None] - used_NG)
            is_large_NG = (piece_NG >= knobs.min_chunk_tokens) | (rest_N1 <= piece_NG)
            fits_NG = (piece_NG > 0.0) & is_large_NG
            has_room_N = fits_NG.any(axis=1)
            target_N = np.where(has_room_N[:, None] & ~fits_NG, np.inf, used_NG).argmin(axis=1)
            given_N = np.where(has_room_N, piece_NG[row_N, target_N], rest_I[open_N])
            taken_IG[open_N, target_N] += given_N
            is_copied_IG[open_N, target_N] = True
            rest_I[open_N] = np.where(given_N >= rest_I[open_N], 0.0, rest_I[open_N] - given_N)
        active_IG += is_copied_IG
        received_IG += is_copied_IG
        sent_IG[row_I, home_I] += is_copied_IG.sum(axis=1)
    shape = (passes, layers, case.ranks.num_ranks)
    return LeastLoadedPlan(
        load_PLG=taken_IG.reshape(shape),
        active_PLG=active_IG.reshape(shape),
        sent_PLG=sent_IG.reshape(shape),
        received_PLG=received_IG.reshape(shape),
    )
