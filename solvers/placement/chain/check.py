"""Recompute what a chain placement costs and name every rule it breaks; trusts no backend.

    L layers   T = L - 1 pairs of layers   E experts   G ranks   S = E slots of a layer

The definitions of `problem.py`, one layer at a time.
"""

import numpy as np

from solvers.placement import single_check
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.ranks import Floats, Placement

violations = single_check.violations


def objective(problem: ChainProblem, placement: Placement) -> float:
    """Cost of an allowed placement; the formulas are in `problem.py`."""
    return float(pair_costs(problem, placement).sum())


def pair_costs(problem: ChainProblem, placement: Placement) -> Floats:
    """Return cost_T: what each pair of layers contributes."""
    rank_S, num_ranks = problem.ranks.rank_S, problem.ranks.num_ranks
    cost_T = np.zeros(problem.num_layers - 1)
    for layer, flow_EE in enumerate(problem.flow_TEE):
        here_S, there_S = placement.expert_LS[layer], placement.expert_LS[layer + 1]
        between_SS = flow_EE[here_S][:, there_S]
        pair_SS = rank_S[:, None] * num_ranks + rank_S[None, :]
        sums = np.bincount(pair_SS.ravel(), between_SS.ravel(), minlength=num_ranks**2)
        priced_GG = problem.cost_GG * sums.reshape(num_ranks, num_ranks)
        is_total = problem.measure is Measure.TOTAL
        cost_T[layer] = priced_GG.sum() if is_total else priced_GG.max()
    return cost_T
