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
import numpy.typing as npt

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.ranks import Floats, Ints

Mask = npt.NDArray[np.bool_]


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
    home_LE = np.argmax(case.copies_LEG, axis=2)
    home_IE = np.tile(home_LE, (passes, 1))
    load_IE = case.load_PLE.reshape(-1, experts)
    ranks = case.ranks.num_ranks
    shape = (passes, layers, ranks)
    state = _start(load_IE, home_IE, ranks=ranks, knobs=knobs)
    order_IE = np.argsort(-load_IE, axis=1, kind="stable")
    for place in range(experts):
        expert_I = order_IE[:, place, None]
        _assign(
            state,
            amount_I=np.take_along_axis(load_IE, expert_I, axis=1)[:, 0],
            home_I=np.take_along_axis(home_IE, expert_I, axis=1)[:, 0],
            knobs=knobs,
        )
    return LeastLoadedPlan(
        load_PLG=state.taken_IG.reshape(shape),
        active_PLG=state.active_IG.reshape(shape),
        sent_PLG=state.sent_IG.reshape(shape),
        received_PLG=state.received_IG.reshape(shape),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _State:
    """Arrays that the plan fills, in place."""

    taken_IG: Floats
    """ga: given to the rank so far."""
    pending_IG: Floats
    """gp: at home on the rank and not yet given away or taken."""
    cap_I: Floats
    """Infinite where the gate keeps everything at home."""
    active_IG: Ints
    sent_IG: Ints
    received_IG: Ints


def _start(load_IE: Floats, home_IE: Ints, *, ranks: int, knobs: LeastLoaded) -> _State:
    pending_IG = np.zeros((len(load_IE), ranks))
    np.add.at(pending_IG, (np.arange(len(load_IE))[:, None], home_IE), load_IE)
    mean_I = pending_IG.mean(axis=1)
    gated_I = pending_IG.max(axis=1) < knobs.gate_ratio * mean_I
    return _State(
        taken_IG=np.zeros_like(pending_IG),
        pending_IG=pending_IG,
        cap_I=np.where(gated_I, np.inf, knobs.capacity_ratio * mean_I),
        active_IG=np.zeros(pending_IG.shape, dtype=np.int64),
        sent_IG=np.zeros(pending_IG.shape, dtype=np.int64),
        received_IG=np.zeros(pending_IG.shape, dtype=np.int64),
    )


def _assign(state: _State, *, amount_I: Floats, home_I: Ints, knobs: LeastLoaded) -> None:
    """Give one expert of every instance to ranks."""
    row_I = np.arange(len(amount_I))
    state.pending_IG[row_I, home_I] -= amount_I
    used_I = state.taken_IG[row_I, home_I] + state.pending_IG[row_I, home_I]
    kept_I = np.clip(state.cap_I - used_I, 0.0, amount_I)
    state.taken_IG[row_I, home_I] += kept_I
    state.active_IG[row_I, home_I] += kept_I > 0.0
    rest_I = amount_I - kept_I
    spilling = np.flatnonzero(rest_I > 0.0)
    copied = np.zeros((len(spilling), state.taken_IG.shape[1]), dtype=np.bool_)
    left = np.arange(len(spilling))
    while len(left):
        instance = spilling[left]
        rest_I[instance] = _spill(
            state,
            instance=instance,
            rest=rest_I[instance],
            home=home_I[instance],
            copied=copied,
            row=left,
            knobs=knobs,
        )
        left = left[rest_I[instance] > 0.0]
    state.active_IG[spilling] += copied
    state.received_IG[spilling] += copied
    state.sent_IG[spilling, home_I[spilling]] += copied.sum(axis=1)


def _spill(
    state: _State,
    *,
    instance: Ints,
    rest: Floats,
    home: Ints,
    copied: Mask,
    row: Ints,
    knobs: LeastLoaded,
) -> Floats:
    """Give one piece of each instance's rest away; return what is left of it."""
    place = np.arange(len(instance))
    used_IG = state.taken_IG[instance] + state.pending_IG[instance]
    used_IG[place, home] = np.inf
    room_IG = state.cap_I[instance, None] - used_IG
    piece_IG: Floats = np.minimum(rest[:, None], room_IG)
    too_small_IG = (piece_IG < knobs.min_chunk_tokens) & (rest[:, None] > piece_IG)
    open_IG: Mask = (piece_IG > 0.0) & ~too_small_IG
    anywhere_I: Mask = np.any(open_IG, axis=1)
    target = np.argmin(
        np.where(anywhere_I[:, None], np.where(open_IG, used_IG, np.inf), used_IG), axis=1
    )
    given = np.where(anywhere_I, piece_IG[place, target], rest)
    state.taken_IG[instance, target] += given
    copied[row, target] = True
    return np.where(given >= rest, 0.0, rest - given)
