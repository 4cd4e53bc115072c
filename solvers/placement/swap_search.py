"""Best-improvement swaps of two experts of a layer: the search of placements without replicas.

    E experts   G ranks   e on rank a, f on rank b

An objective says by how much each of the E (E - 1) / 2 swaps of a layer changes it. The best one is
made as long as it helps. Load of a rank above its limit costs `over` a unit, so that a descent may
begin with ranks that are too full; at infinite `over` no swap may leave one above its limit.
"""

import time
from dataclasses import dataclass

import numpy as np

from solvers.placement.ranks import Floats, Ints


@dataclass(slots=True, kw_only=True, eq=False)
class SwappedLayer:
    """One layer, changed in place; here under its loads alone, which `descend` prices."""

    rank_E: Ints
    """Rank of each expert."""

    def changes_EE(self) -> Floats:
        """Return the change of the objective by each swap, [E][E]."""
        return np.zeros((len(self.rank_E), len(self.rank_E)))

    def swap(self, one: int, two: int) -> None:
        """Swap two experts."""
        self.rank_E[[one, two]] = self.rank_E[[two, one]]


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
        one, two = divmod(int(changed_EE.argmin()), len(load_E))
        if not changed_EE[one, two] < -least_gain:
            break
        layer.swap(one, two)
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
