"""Recompute what a co-activation placement costs and name every rule it breaks; trusts no backend.

    L layers   T sampled tokens   K experts of a token   E experts   G ranks   J groups of a level

The definitions of `problem.py`, one layer and level at a time.
"""

import numpy as np

from solvers.placement import single_check
from solvers.placement.coactivation.problem import CoactivationProblem, Level
from solvers.placement.ranks import Floats, Ints, Placement

violations = single_check.violations


def objective(problem: CoactivationProblem, placement: Placement) -> float:
    """Cost of an allowed placement; the formula is in `problem.py`."""
    return float(layer_costs(problem, placement).sum())


def layer_costs(problem: CoactivationProblem, placement: Placement) -> Floats:
    """Return cost_L: what each layer contributes."""
    cost_L = np.zeros(problem.num_layers)
    for level in problem.levels:
        for layer in range(problem.num_layers):
            count_J = touched(problem, placement, level=level, layer=layer)
            weighted_J = level.weights_J * count_J
            cost_L[layer] += level.total_cost * weighted_J.sum()
            cost_L[layer] += level.peak_cost * level.num_groups * weighted_J.max()
    return cost_L


def touched(
    problem: CoactivationProblem, placement: Placement, *, level: Level, layer: int
) -> Ints:
    """Return count_J: the sampled tokens of a layer that touch each group of a level."""
    group_S = level.group_G[problem.ranks.rank_S]
    group_E = np.empty(problem.num_experts, dtype=np.int64)
    group_E[placement.expert_LS[layer]] = group_S
    group_TK = group_E[problem.expert_LTK[layer]]
    is_touched_TJ = np.zeros((len(group_TK), level.num_groups), dtype=bool)
    is_touched_TJ[np.arange(len(group_TK))[:, None], group_TK] = True
    return np.asarray(is_touched_TJ.sum(axis=0), dtype=np.int64)
