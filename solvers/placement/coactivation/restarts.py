"""Descents by swaps from several starts and after kicks; the best of each layer is kept.

Starts of a layer are that of `swap.py`, and groups of experts that are chosen together more often
than by chance: A(e, f) T / (n_e n_f), with A the tokens of both and n those of each, grown into
ranks by `greedy_groups.py` and, at the sums between ranks, into nodes; brought within the load
limit by load alone where it passes it. Both descend to local optima. Then the better one is kicked:
some random swaps that limits allow, a descent, and back where that did not help; `KICKS` times in a
row without a gain end it.

Layers share the time evenly; what one leaves over goes to the next. Letters: L layers, T tokens, K
experts of a token, E experts, G ranks, N nodes.
"""

import copy
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from solvers.placement.coactivation.bound import tokens_of_both_EE
from solvers.placement.coactivation.layer import Layer, layer_of
from solvers.placement.coactivation.problem import CoactivationProblem
from solvers.placement.coactivation.swap import (
    LEAST_GAIN_RATIO,
    descend,
    solve_layers,
)
from solvers.placement.greedy_groups import grown_groups
from solvers.placement.ranks import Floats, Ints, Placement, Ranks
from solvers.placement.start_placement import rank_loads, repaired
from solvers.result import Claim

SEED: Final = 20_250_812
KICKS: Final = 8
"""In a row without a gain, then a layer is left."""
SWAPS_OF_A_KICK: Final = 4


def solve(
    problem: CoactivationProblem, *, time_limit_s: float, threads: int = 1
) -> Claim[Placement]:
    """Return the best local optimum of every layer, with the bound of `bound.py`."""
    rng = np.random.default_rng(SEED)

    def restarted(number: int, start_E: Ints, deadline_s: float) -> Layer:
        now_s = time.perf_counter()
        until_s = now_s + (deadline_s - now_s) / (problem.num_layers - number)
        return _kicked(_best_start(problem, number, start_E, rng, until_s), rng, until_s)

    return solve_layers(problem, restarted, time_limit_s=time_limit_s)


def _best_start(
    problem: CoactivationProblem,
    number: int,
    start_E: Ints,
    rng: np.random.Generator,
    until_s: float,
) -> Layer:
    descended = []
    for rank_E in (start_E, *_chosen_together(problem, number, rng)):
        layer = layer_of(problem, number, rank_E)
        descend(layer, deadline_s=until_s)
        descended.append(layer)
    return min(descended, key=Layer.cost)


def _chosen_together(
    problem: CoactivationProblem, number: int, rng: np.random.Generator
) -> Iterator[Ints]:
    """The start from groups, where ranks are equal and limits can be kept."""
    ranks = problem.ranks
    ranks_of_N = np.bincount(ranks.node_G)
    if (ranks.slots_G != ranks.slots_G[0]).any() or (ranks_of_N != ranks_of_N[0]).any():
        return
    both_EE = tokens_of_both_EE(problem.expert_LTK[number], problem.num_experts)
    tokens_E = np.bincount(problem.expert_LTK[number].ravel(), minlength=problem.num_experts)
    by_chance_EE = np.maximum(np.outer(tokens_E, tokens_E), 1)
    rank_E = grouped(both_EE / by_chance_EE, ranks)
    if problem.most_load_L is not None:
        load_E, limit = problem.load_LE[number], float(problem.most_load_L[number])
        rank_E = repaired(load_E, rank_E, limit, rng)
        if rank_loads(load_E[None], rank_E[None], ranks.num_ranks).max() > limit:
            return
    yield rank_E


def grouped(likeness_EE: Floats, ranks: Ranks) -> Ints:
    """Return the rank of each expert: like experts on equal ranks, like ranks on equal nodes."""
    group_E = grown_groups(likeness_EE, ranks.num_ranks)
    in_group_GE = (group_E == np.arange(ranks.num_ranks)[:, None]).astype(np.float64)
    node_G = grown_groups(in_group_GE @ likeness_EE @ in_group_GE.T, ranks.num_nodes)
    rank_of_group = np.empty(ranks.num_ranks, dtype=np.int64)
    rank_of_group[np.argsort(node_G, kind="stable")] = np.arange(ranks.num_ranks)
    return np.asarray(rank_of_group[group_E])


def _kicked(layer: Layer, rng: np.random.Generator, until_s: float) -> Layer:
    best, best_cost = layer, layer.cost()
    failed = 0
    while failed < KICKS and time.perf_counter() < until_s:
        other = copy.deepcopy(best, {id(best.expert_TK): best.expert_TK})
        for _ in range(SWAPS_OF_A_KICK):
            allowed = np.argwhere(np.isfinite(other.allowed_changes_EE()))
            if len(allowed):
                one, two = allowed[rng.integers(len(allowed))]
                other.swap(int(one), int(two))
        descend(other, deadline_s=until_s)
        if other.cost() < best_cost * (1.0 - LEAST_GAIN_RATIO):
            best, best_cost, failed = other, other.cost(), 0
        else:
            failed += 1
    return best
