"""A placement without replicas within the ranks' load limits: the start of searches.

    L layers   E experts   G ranks   S = E slots

Longest first (`balance/lpt.py`): experts by falling load, each to the rank with least load among
those with a free slot; all layers at once. A layer that still breaks its
limit is repaired: the swap that takes off most load above the limit is made as long as one helps,
then a few random swaps restart it. "Found none" proves nothing.
"""

import math
import time
from typing import Final

import numpy as np

from solvers.placement.balance.lpt import packed
from solvers.placement.ranks import Floats, Ints, Ranks

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
    if most_load_L is None:
        return rank_LE
    allowed_L = most_load_L * (1.0 + TOLERANCE_RATIO)
    rng = np.random.default_rng(SEED)
    for layer in np.flatnonzero(rank_loads(load_LE, rank_LE, ranks.num_ranks).max(1) > allowed_L):
        row_E = repaired(load_LE[layer], rank_LE[layer], float(allowed_L[layer]), rng)
        if np.bincount(row_E, load_LE[layer]).max() > allowed_L[layer]:
            return None
        rank_LE[layer] = row_E
    return rank_LE


def longest_first(load_LE: Floats, ranks: Ranks) -> Ints:
    """Return rank_LE: experts by falling load, each to the least loaded rank with a free slot."""
    equal = Ranks(slots_G=ranks.slots_G, node_G=ranks.node_G, speed_G=np.ones(ranks.num_ranks))
    expert_LS = packed(load_LE, np.ones(load_LE.shape, dtype=np.int64), equal)
    rank_LE = np.empty_like(expert_LS)
    np.put_along_axis(rank_LE, expert_LS, np.broadcast_to(ranks.rank_S, expert_LS.shape), axis=1)
    return rank_LE


def rank_loads(load_LE: Floats, rank_LE: Ints, num_ranks: int) -> Floats:
    """Return load_LG; one row of loads may stand for all layers."""
    num_layers = len(rank_LE)
    key_LE = rank_LE + num_ranks * np.arange(num_layers)[:, None]
    weights = np.broadcast_to(load_LE, rank_LE.shape).ravel()
    sums = np.bincount(key_LE.ravel(), weights, minlength=num_layers * num_ranks)
    return np.asarray(sums, dtype=np.float64).reshape(num_layers, num_ranks)


def repaired(
    load_E: Floats,
    rank_E: Ints,
    allowed: float,
    rng: np.random.Generator,
    *,
    deadline_s: float = math.inf,
) -> Ints:
    """Return the best of a descent and its restarts; stops as soon as the limit is kept.

    Args:
        load_E: of the layer's experts.
        rank_E: to begin with; what is returned where no time is left.
        allowed: load of a rank.
        rng: of the restarts.
        deadline_s: of `time.perf_counter`.
    """
    best_E, best = rank_E, math.inf
    here_E = rank_E.copy()
    for _ in range(RESTARTS):
        if time.perf_counter() >= deadline_s:
            break
        excess = _descend(load_E, here_E, allowed, deadline_s)
        if excess < best:
            best_E, best = here_E.copy(), excess
        if best == 0.0:
            break
        here_E = best_E.copy()
        for _ in range(KICKS):
            one, two = rng.choice(len(here_E), size=2, replace=False)
            here_E[[one, two]] = here_E[[two, one]]
    return best_E


def _descend(load_E: Floats, rank_E: Ints, allowed: float, deadline_s: float) -> float:
    """Make the swap that takes off most load above the limit, in place; return what is left.

    Only swaps of an expert (M) on a rank above the limit can take some off.
    """
    while True:
        above_G = np.bincount(rank_E, load_E) - allowed
        excess, above_E = float(np.maximum(above_G, 0.0).sum()), above_G[rank_E]
        excess_E = np.maximum(above_E, 0.0)
        mine_M = np.flatnonzero(excess_E)
        if not len(mine_M) or time.perf_counter() >= deadline_s:
            return excess
        less_ME = load_E[mine_M][:, None] - load_E
        changed_ME = np.maximum(above_E[mine_M][:, None] - less_ME, 0.0)
        changed_ME += np.maximum(above_E + less_ME, 0.0)
        changed_ME -= excess_E[mine_M][:, None] + excess_E
        changed_ME[rank_E[mine_M][:, None] == rank_E] = np.inf
        place, two = divmod(int(changed_ME.argmin()), len(load_E))
        if not changed_ME[place, two] < -TOLERANCE_RATIO * allowed:
            return excess
        one = mine_M[place]
        rank_E[[one, two]] = rank_E[[two, one]]
