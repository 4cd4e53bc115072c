"""Best-improvement swaps of two experts of a layer: the search of placements without replicas.

    E experts   G ranks   e on rank a, f on rank b

An objective says by how much each of the E (E - 1) / 2 swaps of a layer changes it. The best one is
made as long as it helps. Load of a rank above its limit costs `over` a unit, so that a descent may
begin with ranks that are too full; at infinite `over` no swap may leave one above its limit.

Searches start within the limits: longest first (`balance/packing.py`), all layers at once. A layer
that still breaks its limit is repaired: the swap that takes off most load above the limit is made
as long as one helps, then a few random swaps restart it. "Found none" proves nothing.
"""

import math
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from solvers.placement.balance.packing import packed
from solvers.placement.ranks import Floats, Ints, Ranks

SEED: Final = 20_251_208
RESTARTS: Final = 40
"""Random swaps after which a layer that does not fit is given up."""
KICKS: Final = 3
"""Random swaps of one restart."""
TOLERANCE_RATIO: Final = 1e-12
"""Share by which a load may exceed its limit from summing in another order."""


@dataclass(slots=True, kw_only=True, eq=False)
class SwappedLayer:
    """One layer, changed in place; here under its loads alone, which `descend` prices."""

    rank_E: Ints
    """Rank of each expert."""

    def changes_EE(self) -> Floats:
        """Return the change of the objective by each swap, [E][E]."""
        return np.zeros((len(self.rank_E), len(self.rank_E)))

    def swap(self, first: int, second: int) -> None:
        """Swap two experts."""
        self.rank_E[[first, second]] = self.rank_E[[second, first]]


def descend(
    layer: SwappedLayer,
    *,
    load_E: Floats,
    most_load: float,
    least_gain: float,
    deadline_s: float,
    over: float = np.inf,
) -> bool:
    """Make the best swap as long as it helps, in place; return whether any was made.

    Args:
        layer: to be improved.
        load_E: of its experts.
        most_load: of a rank.
        least_gain: below which a change is rounding.
        deadline_s: of `time.perf_counter`.
        over: price of load above the limit.
    """
    is_better = False
    while time.perf_counter() < deadline_s:
        changed_EE = layer.changes_EE()
        changed_EE += _overload_EE(layer.rank_E, load_E, most_load, over)
        first, second = divmod(int(changed_EE.argmin()), len(load_E))
        if not changed_EE[first, second] < -least_gain:
            break
        layer.swap(first, second)
        is_better = True
    return is_better


def _overload_EE(rank_E: Ints, load_E: Floats, most_load: float, over: float) -> Floats:
    """Return what each swap changes in the price of load above the limit; infinite on one rank."""
    above_E = np.bincount(rank_E, load_E)[rank_E] - most_load
    more_EE = load_E - load_E[:, None]
    after_EE = np.maximum(above_E[:, None] + more_EE, above_E - more_EE)
    if over == np.inf:
        price_EE = np.where(after_EE > 0.0, np.inf, 0.0)
    elif most_load == np.inf:
        price_EE = np.zeros(more_EE.shape)
    else:
        excess_EE = np.maximum(above_E[:, None] + more_EE, 0.0)
        price_EE = over * (excess_EE - np.maximum(above_E, 0.0)[:, None])
        price_EE += price_EE.T
    price_EE[rank_E[:, None] == rank_E] = np.inf
    return price_EE


def largest_without_two(value_J: Floats) -> Floats:
    """Return [i][j]: the largest value of the groups other than i and j; 0 where there is none."""
    rest_JJ = np.zeros((len(value_J), len(value_J)))
    # One of the three largest is neither of the two; the largest is written last.
    for group in np.argsort(value_J, kind="stable")[-3:]:
        is_other_J = np.arange(len(value_J)) != group
        rest_JJ[np.ix_(is_other_J, is_other_J)] = value_J[group]
    return rest_JJ


def fit(load_LE: Floats, ranks: Ranks, most_load_L: Floats | None) -> Ints | None:
    """Return the rank of each expert within the limits; None where none was found."""
    rank_LE = longest_first(load_LE, ranks)
    limit_L = np.full(len(load_LE), np.inf) if most_load_L is None else most_load_L
    return rank_LE if settle(load_LE, rank_LE, limit_L).all() else None


def longest_first(load_LE: Floats, ranks: Ranks) -> Ints:
    """Return rank_LE: experts by falling load, each to the least loaded rank with a free slot."""
    expert_LS = packed(load_LE, ranks.slots_G)
    rank_LE = np.empty_like(expert_LS)
    np.put_along_axis(rank_LE, expert_LS, np.broadcast_to(ranks.rank_S, expert_LS.shape), axis=1)
    return rank_LE


def settle(
    load_LE: Floats, rank_LE: Ints, limit_L: Floats, *, deadline_s: float = math.inf
) -> npt.NDArray[np.bool_]:
    """Bring layers within their limits by load alone, in place; return for each whether it is.

    Args:
        load_LE: of the experts.
        rank_LE: to begin with; a layer above its limit stays so where no time is left.
        limit_L: largest load of a rank.
        deadline_s: of `time.perf_counter`.
    """
    rng = np.random.default_rng(SEED)
    allowed_L = limit_L * (1.0 + TOLERANCE_RATIO)
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
            first, second = rng.choice(len(here_E), size=2, replace=False)
            here_E[[first, second]] = here_E[[second, first]]
    return best_E


def _excess(load_E: Floats, rank_E: Ints, allowed: float) -> float:
    return float(np.maximum(np.bincount(rank_E, load_E) - allowed, 0.0).sum())
