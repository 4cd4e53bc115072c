"""Placements in which every expert is in one slot, written as the rank of each expert.

    L layers   E experts   G ranks   S = E slots of a layer

The slot within a rank has no cost, so methods search over ranks, and slots follow by rank, experts
ascending. Checkers do not use this file.
"""

import functools
import itertools

import numpy as np

from solvers.placement.ranks import Floats, Ints, Placement


def placed(rank_LE: Ints) -> Placement:
    """Return the placement in which each rank's slots hold its experts, ascending."""
    return Placement(expert_LS=np.argsort(rank_LE, axis=1, kind="stable").astype(np.int64))


def forbid_swaps(
    changed_EE: Floats, *, rank_E: Ints, load_E: Floats, load_G: Floats, most_load: float
) -> None:
    """Set the change of swaps on one rank, or above the largest load of a rank, to infinity."""
    changed_EE[rank_E[:, None] == rank_E] = np.inf
    room_E = most_load - load_G[rank_E]
    more_EE = load_E[:, None] - load_E
    changed_EE[(more_EE > room_E) | (-more_EE > room_E[:, None])] = np.inf


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
        others = np.setdiff1d(np.arange(num_experts), chosen)
        part_YE[:, others] = rest_YF
        parts.append(part_YE)
    rank_XE = np.concatenate(parts)
    return rank_XE[np.lexsort(rank_XE.T[::-1])]
