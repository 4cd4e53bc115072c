"""What the methods of this folder share: costs of replicas, layer times and the robust number.

    W workloads   L layers   E experts   G ranks   S slots of a layer

The checker shares none of this; it reads the definitions of `problem.py` again, line by line.
"""

import itertools

import numpy as np

from solvers.placement.balance.problem import BalanceProblem, Robust
from solvers.placement.ranks import Floats, Ints


def cost_of(share: Floats, active_load: float) -> Floats:
    """What one replica costs that gets `share` of the load; grows with it."""
    if active_load == 0.0:
        return share
    return np.asarray(share - active_load * np.expm1(-share))


def slot_costs(problem: BalanceProblem, expert_LS: Ints, copies_LE: Ints) -> Floats:
    """Cost of every slot, [W][L][S]."""
    cost_WLE = cost_of(problem.load_WLE / np.maximum(copies_LE, 1), problem.active_load)
    index_WLS = np.broadcast_to(expert_LS, (problem.num_workloads, *expert_LS.shape))
    return np.take_along_axis(cost_WLE, index_WLS, axis=2)


def rank_times(problem: BalanceProblem, expert_LS: Ints, copies_LE: Ints) -> Floats:
    """Time of every rank, [W][L][G]."""
    cost_WLS = slot_costs(problem, expert_LS, copies_LE)
    sum_WLG = np.add.reduceat(cost_WLS, problem.ranks.first_slot_G, axis=2)
    return np.asarray(sum_WLG / problem.ranks.speed_G)


def layer_weights(problem: BalanceProblem) -> Floats:
    """Share of a workload's imbalance that one second of any of its layers makes, [W]."""
    return np.asarray(1.0 / problem.mean_WL.sum(axis=1))


def robust_slope(problem: BalanceProblem, imbalance_W: Floats) -> Floats:
    """How much each workload's imbalance counts at these imbalances, [W]; sums to 1."""
    if problem.robust is Robust.MEAN:
        return problem.weight_W
    if problem.robust is Robust.WORST:
        return np.asarray(np.arange(problem.num_workloads) == imbalance_W.argmax(), dtype=float)
    order_W = np.argsort(-imbalance_W, kind="stable")
    before_W = np.cumsum(problem.weight_W[order_W]) - problem.weight_W[order_W]
    part_W = np.clip(problem.tail_ratio - before_W, 0.0, problem.weight_W[order_W])
    slope_W = np.empty(problem.num_workloads)
    slope_W[order_W] = part_W / part_W.sum()
    return slope_W


def slopes(problem: BalanceProblem) -> tuple[Floats, ...]:
    """Every slope that the robust number can have; it is the largest of their products with them.

    One for the mean, one a workload for the worst; for CVaR one for each order of the workloads,
    fewer where orders agree: only for few workloads.
    """
    if problem.robust is Robust.MEAN:
        return (problem.weight_W,)
    orders = itertools.permutations(range(problem.num_workloads))
    if problem.robust is Robust.WORST:
        return tuple(np.eye(problem.num_workloads))
    found = {
        tuple(robust_slope(problem, -np.argsort(np.array(order)).astype(float)).tolist())
        for order in orders
    }
    return tuple(np.array(slope) for slope in sorted(found))


def robust_value(problem: BalanceProblem, imbalance_W: Floats) -> float:
    """The imbalances of the workloads as one number; grows with each of them."""
    return float(imbalance_W @ robust_slope(problem, imbalance_W))


def value_of(problem: BalanceProblem, time_WL: Floats) -> float:
    """The objective of layers whose busiest ranks take `time_WL`; grows with each of them."""
    return robust_value(problem, time_WL.sum(axis=1) * layer_weights(problem))


def planning_loads(problem: BalanceProblem) -> Floats:
    """The one load that rules for a single workload look at, [L][E]: the weighted mean.

    Every workload counts by its weight, whatever its number of recorded tokens.
    """
    factor_W = problem.weight_W * layer_weights(problem)
    return np.asarray(np.einsum("w,wle->le", factor_W, problem.load_WLE))
