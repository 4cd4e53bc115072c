"""Placements in which every expert stands in one slot, written as the rank of each expert.

    L layers   E experts   G ranks   S = E slots of a layer

Which slot of its rank an expert takes has no price, so methods search over ranks and slots follow
by rank, experts ascending. Checkers do without this file.
"""

import functools
import itertools

import numpy as np

from solvers.placement.ranks import Ints, Placement, Ranks


def placed(rank_LE: Ints) -> Placement:
    """Return the placement in which each rank's slots hold its experts, ascending."""
    return Placement(expert_LS=np.argsort(rank_LE, axis=1, kind="stable").astype(np.int64))


def rank_of_expert(placement: Placement, ranks: Ranks) -> Ints:
    """Return rank_LE of a placement without replicas."""
    rank_LE = np.empty_like(placement.expert_LS, dtype=np.int64)
    np.put_along_axis(rank_LE, placement.expert_LS, ranks.rank_S[None, :], axis=1)
    return rank_LE


def every_way(slots_G: tuple[int, ...]) -> Ints:
    """Return all ways to put as many experts as slots on the ranks: rank_XE, in order."""
    return _ways(slots_G).copy()


@functools.lru_cache(maxsize=8)
def _ways(slots_G: tuple[int, ...]) -> Ints:
    num_experts = sum(slots_G)
    if len(slots_G) == 1:
        return np.zeros((1, num_experts), dtype=np.int64)
    *before, last = slots_G
    rest_YF = _ways(tuple(before))
    parts = []
    for chosen in itertools.combinations(range(num_experts), last):
        part_YE = np.full((len(rest_YF), num_experts), len(before), dtype=np.int64)
        others = np.setdiff1d(np.arange(num_experts), chosen)
        part_YE[:, others] = rest_YF
        parts.append(part_YE)
    ways_XE = np.concatenate(parts)
    return ways_XE[np.lexsort(ways_XE.T[::-1])]
