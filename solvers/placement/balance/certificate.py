"""Certify a placement layer by layer: a share of the objective and a bound for each.

    W workloads   L layers

A layer's share of the objective is the time of its most-loaded rank, each workload counted by how
much its imbalance counts in the objective at this placement; the bound of the share uses the same
counts. For the mean the shares sum to the objective and the bounds to its bound. For worst case and
CVaR they sum to the objective, and the bounds to a number that may lie below `bound.bound`.
"""

import numpy as np

from solvers.placement.balance import check
from solvers.placement.balance.bound import layer_bounds
from solvers.placement.balance.objective import layer_weights, robust_slope
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.ranks import Floats, Placement


def certificates(problem: BalanceProblem, placement: Placement) -> tuple[Floats, Floats]:
    """Return the share of every layer in the objective, and its bound, both [L]."""
    time_WL, bound_WL = check.layer_times(problem, placement), layer_bounds(problem)
    imbalance_W = time_WL.sum(axis=1) * layer_weights(problem)
    factor_W = robust_slope(problem, imbalance_W) * layer_weights(problem)
    return np.asarray(factor_W @ time_WL), np.asarray(factor_W @ bound_WL)
