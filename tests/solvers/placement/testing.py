"""Placements without replicas, read back for tests.

L layers   E experts
"""

import numpy as np

from solvers.placement.ranks import Ints, Placement, Ranks


def rank_of_expert(placement: Placement, ranks: Ranks) -> Ints:
    """Return rank_LE of a placement without replicas."""
    rank_LE = np.empty_like(placement.expert_LS, dtype=np.int64)
    np.put_along_axis(rank_LE, placement.expert_LS, ranks.rank_S[None, :], axis=1)
    return rank_LE
