"""HierMoE's swap of two experts, repeated from the best to the best until none helps.

HierMoE (arXiv 2508.09591) swaps one pair per planning step, the one that lowers the cost most.
Here it is repeated to a local optimum, layer by layer, with two additions: a swap that takes a rank
above its load limit is not made, and the start is the placement of the engines (experts in order)
where that keeps the limits, else one that does. The paper smooths the maximum over groups, as it
swaps once; a descent on the cost itself ends no worse, measured by that cost.

A layer costs O(T K^2) for its tables and O(E^2 + T K^3 / E) for every swap; see `swaps.py`. Proves
nothing but what `bound.py` does. Letters: L layers, T tokens, K experts of a token, E experts.
"""

import math
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from solvers.placement.coactivation.bound import lower_bound_L
from solvers.placement.coactivation.layer import Layer, layer_of
from solvers.placement.coactivation.problem import CoactivationProblem
from solvers.placement.ranks import Ints, Placement
from solvers.placement.single import placed
from solvers.placement.start_placement import fit, rank_loads
from solvers.result import Claim, Status

LEAST_GAIN_RATIO: Final = 1e-12
"""Of a layer's cost; less is rounding."""
BOUND_RATIO: Final = 0.3
"""Of the time, at most, for the bound."""
SEARCH_RATIO: Final = 0.95
"""Of the time, when swapping ends; the rest is for what was found."""


def solve(
    problem: CoactivationProblem, *, time_limit_s: float, threads: int = 1
) -> Claim[Placement]:
    """Return the local optimum of every layer, with the bound of `bound.py`."""

    def descended(number: int, start_E: Ints, deadline_s: float) -> Layer:
        layer = layer_of(problem, number, start_E)
        descend(layer, deadline_s=deadline_s)
        return layer

    return solve_layers(problem, descended, time_limit_s=time_limit_s)


def solve_layers(
    problem: CoactivationProblem,
    improved: Callable[[int, Ints, float], Layer],
    *,
    time_limit_s: float,
) -> Claim[Placement]:
    """Improve layer after layer from its start: number, start and the time by which all end."""
    deadline_s = time.perf_counter() + SEARCH_RATIO * time_limit_s
    start_LE = starting_ranks(problem)
    if start_LE is None:
        return without_start(problem)
    bound_L = lower_bound_L(problem, time_limit_s=BOUND_RATIO * time_limit_s)
    rank_LE = start_LE.copy()
    cost = 0.0
    for number in range(problem.num_layers):
        layer = improved(number, start_LE[number], deadline_s)
        rank_LE[number] = layer.rank_E
        cost += layer.cost()
    bound = min(float(bound_L.sum()), cost)
    return Claim(status=Status.FEASIBLE, solution=placed(rank_LE), bound=bound)


def starting_ranks(problem: CoactivationProblem) -> Ints | None:
    """Return experts in order where they may stay so, else a fitting start; None: none found."""
    ranks = problem.ranks
    in_order_LE = np.tile(ranks.rank_S, (problem.num_layers, 1))
    if problem.most_load_L is None:
        return in_order_LE
    fitted = fit(problem.load_LE, ranks, problem.most_load_L)
    if not fitted.fits:
        return None
    largest_L = rank_loads(problem.load_LE, in_order_LE, ranks.num_ranks).max(axis=1)
    return np.where((largest_L <= problem.most_load_L)[:, None], in_order_LE, fitted.rank_LE)


def without_start(problem: CoactivationProblem) -> Claim[Placement]:
    """Return the claim where no start within the limits was found."""
    if fit(problem.load_LE, problem.ranks, problem.most_load_L).is_proven:
        return Claim(status=Status.INFEASIBLE, solution=None, bound=math.inf)
    return Claim(status=Status.UNKNOWN, solution=None, bound=-math.inf)


def descend(layer: Layer, *, deadline_s: float) -> None:
    """Make the best allowed swap as long as it helps, in place."""
    least_gain = LEAST_GAIN_RATIO * (layer.cost() + 1.0)
    while time.perf_counter() < deadline_s:
        changed_EE = layer.allowed_changes_EE()
        one, two = divmod(int(changed_EE.argmin()), len(layer.rank_E))
        if not changed_EE[one, two] < -least_gain:
            return
        layer.swap(one, two)
