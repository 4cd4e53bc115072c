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

import itertools
import time
from typing import Final

import numpy as np

from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.flow_bound import most_staying_by_matching, most_staying_cut_at
from solvers.placement.ranks import Floats, Ints

HEIGHTS: Final = (8.0, 4.0, 16.0, 6.0, 12.0, 2.0, 32.0)
"""Cells at which flows are cut, as multiples of the mean cell; in this order, as cells of
gamma(0.5) are bounded best at 4 to 16 and others were not tried."""
ROUNDING_RATIO: Final = 1e-12
"""Share of a pair's flow, and of its largest cost, taken off for rounding: sums of E * E numbers in
another order."""


def lower_bound(problem: ChainProblem, *, time_limit_s: float) -> float:
    """Return a cost that no placement is below; sooner the less time there is."""
    deadline_s = time.perf_counter() + time_limit_s
    most_expensive, groups = _groups(problem)
    flow_TEE, total_T = problem.flow_TEE, problem.flow_TEE.sum(axis=(1, 2))
    bound_T = (1.0 - ROUNDING_RATIO) * most_expensive * total_T
    for gain, slots_J in groups:
        bound_T -= gain * _most_staying_T(flow_TEE, slots_J, deadline_s)
    bound_T = np.maximum(bound_T, 0.0)
    if problem.measure is Measure.MOST_LOADED_PAIR:
        bound_T /= max(1, int((problem.cost_GG > 0.0).sum()))
        between = problem.cost_GG[~np.eye(problem.ranks.num_ranks, dtype=bool)]
        if len(between) and (between > 0.0).all():
            most_T = _most_staying_T(flow_TEE, problem.ranks.slots_G, deadline_s)
            leaving_T = (1.0 - ROUNDING_RATIO) * total_T - most_T
            bound_T = np.maximum(bound_T, leaving_T / (1.0 / between).sum())
    return float(bound_T.sum())


def _groups(problem: ChainProblem) -> tuple[float, list[tuple[float, Ints]]]:
    """The least cost of a copy that stays nowhere; what one saves in a group, and their slots."""
    ranks, cost_GG = problem.ranks, problem.cost_GG
    is_rank = np.eye(ranks.num_ranks, dtype=bool)
    is_node = ranks.node_G[:, None] == ranks.node_G
    near = float(cost_GG[is_node & ~is_rank].min(initial=np.inf))
    far = near if ranks.num_nodes == 1 else float(cost_GG[~is_node].min())
    local = min(float(cost_GG[is_rank].min()), near, far)
    far = far if np.isfinite(far) else local
    near = min(near, far)
    on_nodes_N = np.bincount(ranks.node_G, ranks.slots_G).astype(np.int64)
    kinds = [(far - near, on_nodes_N), (near - local, ranks.slots_G)]
    return far, [kind for kind in kinds if kind[0] > 0.0]


def _most_staying_T(flow_TEE: Floats, slots_J: Ints, deadline_s: float) -> Floats:
    """Return the largest flow that can stay in groups of these slots, for each pair of layers."""
    size = int(slots_J.max())
    most_T = np.array([most_staying_by_matching(flow_EE, group_size=size) for flow_EE in flow_TEE])
    heights = HEIGHTS if (slots_J == size).all() else ()
    for height, (pair, flow_EE) in itertools.product(heights, enumerate(flow_TEE)):
        if time.perf_counter() >= deadline_s:
            break
        cut = height * float(flow_EE.mean())
        cut_bound = most_staying_cut_at(flow_EE, cut, num_groups=len(slots_J))
        most_T[pair] = min(most_T[pair], cut_bound)
    return most_T
