"""Costs of replicas, layer times and the robust objective, shared by the methods of this folder.

    D launches   W workloads   L layers   E experts   G ranks   S slots of a layer

The checker shares none of this; it reads the definitions of `problem.py` again, line by line.
"""

from typing import Final

import numpy as np

from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch, Robust
from solvers.placement.dispatch.launches import launched_shares
from solvers.placement.dispatch.nearest import near_shares
from solvers.placement.ranks import Floats, Placement

LAUNCHES: Final = 16
"""Launches that a placement is evaluated by, where dispatch is random."""


def cost_of(share: Floats, active_load: float) -> Floats:
    """Return the cost of a replica that gets `share` of the load; it grows with the share."""
    if active_load == 0.0:
        return share
    return np.asarray(share - active_load * np.expm1(-share))


def slot_shares(problem: BalanceProblem, placement: Placement, *, seed: int) -> Floats:
    """Return the share of its expert's tokens that every slot takes, [D][L][S].

    Only static dispatch differs from launch to launch.
    """
    ranks, expert_LS = problem.ranks, placement.expert_LS
    if problem.dispatch is ReplicaDispatch.STATIC:
        return launched_shares(placement, ranks, seed=seed, launches=LAUNCHES)
    if problem.dispatch is ReplicaDispatch.NEAR:
        return near_shares(expert_LS, ranks=ranks, num_experts=problem.num_experts).mean_LS[None]
    copies_LE = placement.copies_LE(problem.num_experts)
    return 1.0 / np.take_along_axis(copies_LE, expert_LS, axis=1)[None]


def largest_times(problem: BalanceProblem, placement: Placement, *, seed: int = 0) -> Floats:
    """Return the time of the most-loaded rank in each of some launches, [D][W][L].

    Args:
        problem: with loads and ranks.
        placement: of every layer.
        seed: of launches, where dispatch is random.
    """
    ranks = problem.ranks
    share_DLS = slot_shares(problem, placement, seed=seed)
    load_WLS = np.take_along_axis(problem.load_WLE, placement.expert_LS[None], axis=2)
    cost_DWLS = cost_of(share_DLS[:, None] * load_WLS, problem.active_load)
    time_DWLG = np.add.reduceat(cost_DWLS, ranks.first_slot_G, axis=3) / ranks.speed_G
    return np.asarray(time_DWLG.max(axis=3))


def layer_weights(problem: BalanceProblem) -> Floats:
    """Share of a workload's imbalance that one second of any of its layers makes, [W]."""
    return np.asarray(1.0 / problem.mean_WL.sum(axis=1))


def time_weights(problem: BalanceProblem, time_WL: Floats) -> Floats:
    """Return what a second of any layer of each workload adds to the objective, [W]."""
    weight_W = layer_weights(problem)
    return robust_slope(problem, time_WL.sum(axis=1) * weight_W) * weight_W


def robust_slope(problem: BalanceProblem, imbalance_W: Floats) -> Floats:
    """Return the weight of each workload's imbalance at these imbalances, [W]; sums to 1."""
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


def value_of(problem: BalanceProblem, time_WL: Floats) -> float:
    """The objective of layers whose most-loaded ranks take `time_WL`; grows with each of them."""
    return float(time_weights(problem, time_WL) @ time_WL.sum(axis=1))


def planning_loads(problem: BalanceProblem) -> Floats:
    """The load for rules that take a single workload, [L][E]: the weighted mean.

    Every workload counts by its weight, whatever its number of recorded tokens.
    """
    factor_W = problem.weight_W * layer_weights(problem)
    return np.asarray(np.einsum("w,wle->le", factor_W, problem.load_WLE))
