"""A placement without replicas within the ranks' load limits: the start of searches.

    L layers   E experts   G ranks   S = E slots

Longest first (`balance/packing.py`): experts by falling load, each to the rank with least load
among those with a free slot; all layers at once. A layer that still breaks its limit is repaired:
the swap that takes off most load above the limit is made as long as one helps, then a few random
swaps restart it. "Found none" proves nothing.
"""

import math
import time
from typing import Final

import numpy as np
import numpy.typing as npt

from solvers.placement.balance.packing import packed
from solvers.placement.ranks import Floats, Ints, Ranks
from solvers.placement.swap_search import SwappedLayer, descend

SEED: Final = 20_251_208
RESTARTS: Final = 40
"""Random swaps after which a layer that does not fit is given up."""
KICKS: Final = 3
"""Random swaps of one restart."""
TOLERANCE_RATIO: Final = 1e-12
"""Share by which a load may exceed its limit from summing in another order."""


def fit(load_LE: Floats, ranks: Ranks, most_load_L: Floats | None) -> Ints | None:
    """Return the rank of each expert within the limits; None where none was found."""
    rank_LE = longest_first(load_LE, ranks)
    return rank_LE if settle(load_LE, rank_LE, most_load_L).all() else None


def longest_first(load_LE: Floats, ranks: Ranks) -> Ints:
    """Return rank_LE: experts by falling load, each to the least loaded rank with a free slot."""
    expert_LS = packed(load_LE, ranks.slots_G)
    rank_LE = np.empty_like(expert_LS)
    np.put_along_axis(rank_LE, expert_LS, np.broadcast_to(ranks.rank_S, expert_LS.shape), axis=1)
    return rank_LE


def settle(
    load_LE: Floats, rank_LE: Ints, most_load_L: Floats | None, *, deadline_s: float = math.inf
) -> npt.NDArray[np.bool_]:
    """Bring layers within their limits by load alone, in place; return for each whether it is.

    Args:
        load_LE: of the experts.
        rank_LE: to begin with; a layer above its limit stays so where no time is left.
        most_load_L: the limits.
        deadline_s: of `time.perf_counter`.
    """
    if most_load_L is None:
        return np.ones(len(load_LE), dtype=bool)
    rng = np.random.default_rng(SEED)
    allowed_L = most_load_L * (1.0 + TOLERANCE_RATIO)
    for load_E, rank_E, allowed in zip(load_LE, rank_LE, allowed_L.tolist(), strict=True):
        rank_E[:] = _repaired(load_E, rank_E, allowed, rng, deadline_s)
    return np.asarray(rank_loads(load_LE, rank_LE).max(axis=1) <= allowed_L)


def rank_loads(load_LE: Floats, rank_LE: Ints) -> Floats:
    """Return load_LG."""
    num_ranks = int(rank_LE.max()) + 1
    rows = zip(load_LE, rank_LE, strict=True)
    return np.stack([np.bincount(rank_E, load_E, num_ranks) for load_E, rank_E in rows])


def _repaired(
    load_E: Floats, rank_E: Ints, allowed: float, rng: np.random.Generator, deadline_s: float
) -> Ints:
    """Return the best of a descent and its restarts; stops as soon as the limit is kept."""
    best_E, best, here_E = rank_E, _excess(load_E, rank_E, allowed), rank_E.copy()
    for _ in range(RESTARTS):
        if best == 0.0 or time.perf_counter() >= deadline_s:
            break
        descend(
            SwappedLayer(rank_E=here_E),
            load_E=load_E,
            most_load=allowed,
            least_gain=TOLERANCE_RATIO * allowed,
            deadline_s=deadline_s,
            over=1.0,
        )
        if (excess := _excess(load_E, here_E, allowed)) < best:
            best_E, best = here_E.copy(), excess
        here_E = best_E.copy()
        for _ in range(KICKS):
            one, two = rng.choice(len(here_E), size=2, replace=False)
            here_E[[one, two]] = here_E[[two, one]]
    return best_E


def _excess(load_E: Floats, rank_E: Ints, allowed: float) -> float:
    return float(np.maximum(np.bincount(rank_E, load_E) - allowed, 0.0).sum())
