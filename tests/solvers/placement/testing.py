"""Placements without replicas, read back for tests.

L layers   E experts
"""

import functools
import itertools

import numpy as np

from solvers.placement.ranks import Ints, Placement, Ranks


def rank_of_expert(placement: Placement, ranks: Ranks) -> Ints:
    """Return rank_LE of a placement without replicas."""
    rank_LE = np.empty_like(placement.expert_LS, dtype=np.int64)
    np.put_along_axis(rank_LE, placement.expert_LS, ranks.rank_S[None, :], axis=1)
    return rank_LE


def all_assignments(slots_G: tuple[int, ...]) -> Ints:
    """Return all assignments of as many experts as slots to the ranks: rank_XE, in order."""
    return _assignments(slots_G).copy()


@functools.lru_cache(maxsize=8)
def _assignments(slots_G: tuple[int, ...]) -> Ints:
    num_experts = sum(slots_G)
    if len(slots_G) == 1:
        return np.zeros((1, num_experts), dtype=np.int64)
    *before, last = slots_G
    rest_YF = _assignments(tuple(before))
    parts = []
    for chosen in itertools.combinations(range(num_experts), last):
        part_YE = np.full((len(rest_YF), num_experts), len(before), dtype=np.int64)
        part_YE[:, np.setdiff1d(np.arange(num_experts), chosen)] = rest_YF
        parts.append(part_YE)
    rank_XE = np.concatenate(parts)
    return rank_XE[np.lexsort(rank_XE.T[::-1])]
