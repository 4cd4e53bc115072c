"""A lower bound on the cost of any co-activation placement, layer by layer.

    L layers   T tokens   K experts of a token   E experts   J groups of n slots of a level

A token whose K experts are in j groups has at least

    pairs(j) = the pairs in one group if K is split over j groups as evenly as can be

pairs of experts that share a group. So a token that saves s = K - j copies has pairs(K - s) such
pairs or more, and with f the concave hull of the points (pairs(j), K - j), j from the fewest groups
that hold K experts, all tokens together save at most T f(Q / T) (Jensen), where Q is the number of
pairs that share a group, over all tokens. Q is what co-activation counts A(e, f) keep in groups,

    Q <= 1/2 max <A, x>,    x(e, f) = 1: in one group

which `flow_bound.py` bounds: each expert has at most n - 1 others in its group. So F = T (K - f)
copies go into groups at least, at most T into each. At best the groups of least weight take them,
and the most expensive group has M with

    F <= sum_j min(T, M / w(j)),    so M >= F / sum_j 1 / w(j)

With weights of 1 that is the mean, rounded up, as tokens are whole.
"""

import math
import time
from typing import Final

import numpy as np

from solvers.placement.coactivation.problem import CoactivationProblem, Level
from solvers.placement.coactivation.swaps import BLOCK_TOKENS
from solvers.placement.flow_bound import most_staying_by_matching
from solvers.placement.ranks import Floats, Ints

ROUNDING_RATIO: Final = 1e-9
"""Share of a token by which rounding may raise a bound; subtracted before rounding up to whole
copies."""


def lower_bound_L(problem: CoactivationProblem, *, deadline_s: float = math.inf) -> Floats:
    """Return what each layer costs at least; 0 for those that are not begun by the deadline.

    `deadline_s` is one of `time.perf_counter`.
    """
    bound_L = np.zeros(problem.num_layers)
    for layer, expert_TK in enumerate(problem.expert_LTK):
        if time.perf_counter() >= deadline_s:
            break
        both_EE = tokens_of_both_EE(expert_TK, problem.num_experts)
        for level in problem.levels:
            weight_J, num_tokens = np.sort(level.weights_J), len(expert_TK)
            copies = fewest_copies(problem, level, both_EE)
            # The cheapest groups take a copy of every token first.
            taken_J = np.clip(copies - num_tokens * np.arange(len(weight_J)), 0.0, num_tokens)
            peak = copies / (1.0 / weight_J).sum()
            peak = math.ceil(peak) if (weight_J == 1.0).all() else peak
            bound_L[layer] += level.total_cost * (weight_J @ taken_J)
            bound_L[layer] += level.peak_cost * level.num_groups * peak
    return bound_L


def fewest_copies(problem: CoactivationProblem, level: Level, both_EE: Floats) -> float:
    """Return the least number of token copies of a layer into groups of a level.

    `both_EE` are the counts of `tokens_of_both_EE`.
    """
    _, num_tokens, num_chosen = problem.expert_LTK.shape
    slots_J = np.bincount(level.group_G, problem.ranks.slots_G).astype(np.int64)
    most_staying = 0.0
    if slots_J.max() > 1:
        most_staying = most_staying_by_matching(both_EE, group_size=int(slots_J.max()) - 1) / 2.0
    saved = num_tokens * most_saved(most_staying / num_tokens, num_chosen, slots_J)
    return float(math.ceil(num_tokens * num_chosen - saved - ROUNDING_RATIO * num_tokens))


def most_saved(pairs_shared: float, num_chosen: int, slots_J: Ints) -> float:
    """Return f: the most copies that a token can save on average with that many shared pairs."""
    held_J = np.cumsum(np.sort(slots_J)[::-1])
    fewest = int(np.searchsorted(held_J, num_chosen)) + 1
    groups = np.arange(num_chosen, fewest - 1, -1)
    least, more = num_chosen // groups, num_chosen % groups
    pairs = (groups - more) * least * (least - 1) // 2 + more * (least + 1) * least // 2
    return float(np.interp(pairs_shared, pairs, num_chosen - groups))


def tokens_of_both_EE(expert_TK: Ints, num_experts: int) -> Floats:
    """Return how many tokens chose both; zero on the diagonal."""
    both_EE = np.zeros((num_experts, num_experts))
    for first in range(0, len(expert_TK), BLOCK_TOKENS):
        block_NK = expert_TK[first : first + BLOCK_TOKENS]
        chosen_NE = np.zeros((len(block_NK), num_experts), dtype=np.float32)
        np.put_along_axis(chosen_NE, block_NK, 1.0, axis=1)
        both_EE += chosen_NE.T @ chosen_NE
    np.fill_diagonal(both_EE, 0.0)
    return both_EE
