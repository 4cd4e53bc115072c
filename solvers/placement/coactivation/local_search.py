"""HierMoE's swap of two experts, repeated from the best to the best until none helps.

HierMoE (arXiv 2508.09591) swaps one pair per planning step, the one that lowers the cost most.
Here it is repeated to a local optimum (`swap_search.py`), layer by layer, with two additions: a
swap that takes a rank above its load limit is not made, and the start is the placement of the
engines (experts in order) where that keeps the limits, else one that does. The paper smooths the
maximum over groups, as it swaps once; a descent on the cost itself ends no worse, measured by that
cost. That is `swaps`; `solve` also starts from groups of experts that are chosen together more
often than by chance, put on ranks and like ranks on nodes, and brought within the load limit by
load alone where they pass it, and takes the better of the two.

A layer costs O(T K^2) for its tables and O(E^2 + T K^3 / E) for every swap; see `swaps.py`. Proves
nothing but what `bound.py` does. Layers share the time evenly, tables and groups included; those
for which none is left keep their start. Letters: L layers, T tokens, K
experts of a token, E experts, G ranks, N nodes.
"""

import math
import time
from collections.abc import Iterator
from itertools import chain
from typing import Final

import numpy as np

from solvers.placement.coactivation.bound import lower_bound_L, tokens_of_both_EE
from solvers.placement.coactivation.problem import CoactivationProblem
from solvers.placement.coactivation.swaps import CoactivatedLayer
from solvers.placement.greedy_groups import grown_groups
from solvers.placement.ranks import Floats, Ints, Placement, Ranks, placed
from solvers.placement.swap_search import descend, fit, rank_loads, settle
from solvers.result import Claim, Status

SEED: Final = 20_250_812
LEAST_GAIN_RATIO: Final = 1e-12
"""Smallest gain that counts, as a share of a layer's cost; less is rounding."""
BOUND_RATIO: Final = 0.3
"""Share of the time limit after which no layer's bound is begun."""
SEARCH_RATIO: Final = 0.95
"""Share of the time limit after which swaps end; the rest is for pricing the candidates."""


def solve(
    problem: CoactivationProblem, *, time_limit_s: float, threads: int = 1
) -> Claim[Placement]:
    """Return the better local optimum of every layer from two starts."""
    return _solved(problem, time_limit_s=time_limit_s, with_groups=True)


def swaps(
    problem: CoactivationProblem, *, time_limit_s: float, threads: int = 1
) -> Claim[Placement]:
    """Return the local optimum of every layer from the engines' placement."""
    return _solved(problem, time_limit_s=time_limit_s, with_groups=False)


def _solved(
    problem: CoactivationProblem, *, time_limit_s: float, with_groups: bool
) -> Claim[Placement]:
    begun_s = time.perf_counter()
    deadline_s = begun_s + SEARCH_RATIO * time_limit_s
    start_LE = starting_ranks(problem)
    if start_LE is None:
        return Claim(status=Status.UNKNOWN, solution=None, bound=-math.inf)
    bound_L = lower_bound_L(problem, deadline_s=begun_s + BOUND_RATIO * time_limit_s)
    cost = 0.0
    for number, rank_E in enumerate(start_LE):
        now_s = time.perf_counter()
        if now_s >= deadline_s:
            # Its tables would take longer than is left; the start stays, its cost is not known.
            cost = math.inf
            break
        until_s = now_s + (deadline_s - now_s) / (problem.num_layers - number)
        descended = []
        grown = _chosen_together(problem, number, until_s) if with_groups else ()
        for begin_E in chain([rank_E], grown):
            layer = CoactivatedLayer.of(problem, number, begin_E)
            descend(
                layer,
                load_E=problem.load_LE[number],
                most_load=float(problem.limit_L[number]),
                least_gain=LEAST_GAIN_RATIO * (layer.cost() + 1.0),
                deadline_s=until_s,
            )
            descended.append(layer)
        best = min(descended, key=lambda candidate: candidate.cost())
        start_LE[number] = best.rank_E
        cost += best.cost()
    bound = min(float(bound_L.sum()), cost)
    return Claim(status=Status.FEASIBLE, solution=placed(start_LE), bound=bound)


def starting_ranks(problem: CoactivationProblem) -> Ints | None:
    """Return experts in order where they may stay so, else a fitting start; None: none found."""
    in_order_LE = np.tile(problem.ranks.rank_S, (problem.num_layers, 1))
    fits_L = rank_loads(problem.load_LE, in_order_LE).max(axis=1) <= problem.limit_L
    fitted_LE = fit(problem.load_LE, problem.ranks, problem.limit_L)
    return None if fitted_LE is None else np.where(fits_L[:, None], in_order_LE, fitted_LE)


def _chosen_together(
    problem: CoactivationProblem, number: int, deadline_s: float
) -> Iterator[Ints]:
    """The start from groups, where ranks are equal, limits can be kept and time is left."""
    ranks = problem.ranks
    ranks_of_N = np.bincount(ranks.node_G)
    is_even = (ranks.slots_G == ranks.slots_G[0]).all() and (ranks_of_N == ranks_of_N[0]).all()
    if not is_even or time.perf_counter() >= deadline_s:
        return
    both_EE = tokens_of_both_EE(problem.expert_LTK[number], problem.num_experts)
    tokens_E = np.bincount(problem.expert_LTK[number].ravel(), minlength=problem.num_experts)
    by_chance_EE = np.maximum(np.outer(tokens_E, tokens_E), 1)
    rank_E, layer = grouped(both_EE / by_chance_EE, ranks), slice(number, number + 1)
    limit_1 = problem.limit_L[layer]
    if settle(problem.load_LE[layer], rank_E[None], limit_1, deadline_s=deadline_s).all():
        yield rank_E


def grouped(likeness_EE: Floats, ranks: Ranks) -> Ints:
    """Return the rank of each expert: like experts on equal ranks, like ranks on equal nodes."""
    group_E = grown_groups(likeness_EE, ranks.num_ranks)
    in_group_GE = (group_E == np.arange(ranks.num_ranks)[:, None]).astype(np.float64)
    node_G = grown_groups(in_group_GE @ likeness_EE @ in_group_GE.T, ranks.num_nodes)
    rank_of_group = np.empty(ranks.num_ranks, dtype=np.int64)
    rank_of_group[np.argsort(node_G, kind="stable")] = np.arange(ranks.num_ranks)
    return np.asarray(rank_of_group[group_E])
