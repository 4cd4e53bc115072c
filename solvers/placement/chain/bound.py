"""A lower bound on the cost of any chain placement, by pair of layers.

    T pairs of layers   E experts   H kinds of groups   J groups of a kind

Costs are bounded by three: the least on a rank, inside a node and between nodes. So a pair costs
the last for its whole flow, less what stays on nodes and on ranks; `flow_bound.py` says how much of
a flow can stay at most. The most-loaded pair of ranks pays at least the mean over the pairs that
have a price; and a flow F that cannot stay on its rank puts max_gh cost(g, h) flow(g, h) >= F /
sum_gh 1 / cost(g, h) on some pair of ranks. Load limits are not used, nor that a layer's placement
is the same for the layers before and after it.

The first pass takes the matching bound alone, milliseconds a pair; later ones cut the flow at
heights that are multiples of its mean cell, one after the other until time is up. Every pass only
raises the bound.
"""

import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.flow_bound import most_staying_by_matching, most_staying_cut_at
from solvers.placement.ranks import Floats

HEIGHTS: Final = (8.0, 4.0, 16.0, 6.0, 12.0, 2.0, 32.0)
"""Cells at which flows are cut, as multiples of the mean cell; in this order, as cells of
gamma(0.5) are bounded best at 4 to 16 and others were not tried."""
ROUNDING_RATIO: Final = 1e-12
"""Share of a pair's flow, and of its largest cost, taken off for rounding: sums of E * E numbers in
another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowGroup:
    """One kind of group that flow can stay in."""

    gain: float
    """Cost saved by one token copy that stays in its group."""
    size: int
    num_groups: int | None
    """Number of groups; None: groups differ in size."""


def lower_bound(problem: ChainProblem, *, time_limit_s: float) -> float:
    """Return a cost that no placement is below; sooner the less time there is."""
    return float(pair_bounds(problem, time_limit_s=time_limit_s).sum())


def pair_bounds(problem: ChainProblem, *, time_limit_s: float) -> Floats:
    """Return bound_T: what each pair of layers costs at least."""
    deadline_s = time.perf_counter() + time_limit_s
    most_expensive, groups = _groups(problem)
    total_T = problem.flow_TEE.sum(axis=(1, 2))
    bound_T = most_expensive * total_T
    for group, most_T in zip(
        groups, _most_staying_HT(problem.flow_TEE, groups, deadline_s), strict=True
    ):
        bound_T = bound_T - group.gain * most_T
    bound_T = np.maximum(bound_T - ROUNDING_RATIO * most_expensive * total_T, 0.0)
    if problem.measure is Measure.MOST_LOADED_PAIR:
        bound_T = bound_T / max(1, int((problem.cost_GG > 0.0).sum()))
        bound_T = np.maximum(bound_T, _leaving_T(problem, total_T, deadline_s))
    return np.asarray(bound_T)


def _leaving_T(problem: ChainProblem, total_T: Floats, deadline_s: float) -> Floats:
    """Return a lower bound on the most-loaded pair's cost, from flow that must leave its rank."""
    ranks = problem.ranks
    between = problem.cost_GG[~np.eye(ranks.num_ranks, dtype=bool)]
    if not len(between) or (between <= 0.0).any():
        return np.zeros_like(total_T)
    is_uniform = (ranks.slots_G == ranks.slots_G[0]).all()
    rank = FlowGroup(
        gain=1.0,
        size=int(ranks.slots_G.max()),
        num_groups=ranks.num_ranks if is_uniform else None,
    )
    (most_T,) = _most_staying_HT(problem.flow_TEE, (rank,), deadline_s)
    leaving_T = np.maximum(total_T - most_T - ROUNDING_RATIO * total_T, 0.0)
    return np.asarray(leaving_T / (1.0 / between).sum())


def _groups(problem: ChainProblem) -> tuple[float, tuple[FlowGroup, ...]]:
    """The least cost of a copy that stays nowhere, and where it can stay."""
    ranks, cost_GG = problem.ranks, problem.cost_GG
    is_rank = np.eye(ranks.num_ranks, dtype=bool)
    is_node = ranks.node_G[:, None] == ranks.node_G
    near = float(cost_GG[is_node & ~is_rank].min(initial=np.inf))
    far = min(
        float(cost_GG[~is_node].min(initial=np.inf)), near if ranks.num_nodes == 1 else np.inf
    )
    own = min(float(cost_GG[is_rank].min()), near, far)
    far = far if np.isfinite(far) else own
    near = min(near, far)
    kinds = ((far - near, np.bincount(ranks.node_G, ranks.slots_G)), (near - own, ranks.slots_G))
    return far, tuple(
        FlowGroup(
            gain=gain,
            size=int(slots_J.max()),
            num_groups=len(slots_J) if (slots_J == slots_J[0]).all() else None,
        )
        for gain, slots_J in kinds
        if gain > 0.0
    )


def _most_staying_HT(flow_TEE: Floats, groups: tuple[FlowGroup, ...], deadline_s: float) -> Floats:
    """Return the largest flow that can stay in its group, per kind of group and pair of layers."""
    most_HT = np.array(
        [
            [most_staying_by_matching(flow_EE, group_size=group.size) for flow_EE in flow_TEE]
            for group in groups
        ]
    ).reshape(len(groups), len(flow_TEE))
    for height in HEIGHTS:
        for most_T, group in zip(most_HT, groups, strict=True):
            for pair, flow_EE in enumerate(flow_TEE):
                if group.num_groups is None or time.perf_counter() >= deadline_s:
                    break
                cut = height * float(flow_EE.mean())
                cut_bound = most_staying_cut_at(flow_EE, cut, num_groups=group.num_groups)
                most_T[pair] = min(most_T[pair], cut_bound)
    return most_HT
