"""Costs of replicas, layer times and the robust objective, shared by the methods of this folder.

    W workloads   L layers   E experts   G ranks   S slots of a layer

The checker shares none of this; it reads the definitions of `problem.py` again, line by line.
"""

import numpy as np

from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch, Robust
from solvers.placement.dispatch.scatter import Shares, near_shares
from solvers.placement.ranks import Floats, Ints, Placement

WIDTH = 5.0
"""Deviations from the mean that a normal number keeps within, for the largest of some."""

POINTS = 33
"""Points at which the distribution of the maximum is evaluated."""


def cost_of(share: Floats, active_load: float) -> Floats:
    """Return the cost of a replica that gets `share` of the load; it grows with the share."""
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


def slot_shares(problem: BalanceProblem, expert_LS: Ints) -> Shares:
    """Return the share of its expert's tokens that every slot takes where near replicas are first.

    Only static dispatch differs from launch to launch.
    """
    shares = near_shares(expert_LS, ranks=problem.ranks, num_experts=problem.num_experts)
    if problem.dispatch is ReplicaDispatch.STATIC:
        return shares
    return Shares(mean_LS=shares.mean_LS, variance_LS=np.zeros_like(shares.variance_LS))


def slot_variances(
    load_WLE: Floats, variance_WLE: Floats | None, expert_LS: Ints, shares: Shares
) -> Floats:
    """Variance of what every slot takes, [W][L][S], by what is drawn and by what loads will be.

    Of a product of two independent numbers, the product of both variances left out. Replicas of one
    expert rise and fall together, which is taken as independent: the largest is guessed high.
    """
    load_WLS = np.take_along_axis(load_WLE, expert_LS[None], axis=2)
    found_WLS = np.square(load_WLS) * shares.variance_LS
    if variance_WLE is not None:
        scatter_WLS = np.take_along_axis(variance_WLE, expert_LS[None], axis=2)
        found_WLS += np.square(shares.mean_LS) * scatter_WLS
    return np.asarray(found_WLS)


def largest_times(problem: BalanceProblem, expert_LS: Ints) -> Floats:
    """Time of the most-loaded rank, [W][L]; its mean over launches where dispatch is random.

    Where near replicas come first and the problem says how loads scatter, over these, too. It is a
    guess: ranks are taken as independent and normal, E = lo + integral of 1 - prod_g F_g from lo,
    below which the product is next to 0. The checker draws launches.
    """
    ranks = problem.ranks
    if not problem.dispatch.is_near:
        copies_LE = Placement(expert_LS=expert_LS).copies_LE(problem.num_experts)
        return np.asarray(rank_times(problem, expert_LS, copies_LE).max(axis=2))
    shares = slot_shares(problem, expert_LS)
    load_WLS = np.take_along_axis(problem.load_WLE, expert_LS[None], axis=2)
    first_G = ranks.first_slot_G
    cost_WLS = cost_of(load_WLS * shares.mean_LS, problem.active_load)
    mean_WLG = np.add.reduceat(cost_WLS, first_G, axis=2) / ranks.speed_G
    slot_WLS = slot_variances(problem.load_WLE, problem.variance_WLE, expert_LS, shares)
    variance_WLG = np.add.reduceat(slot_WLS, first_G, axis=2)
    return expected_largest(mean_WLG, np.sqrt(variance_WLG) / ranks.speed_G)


def expected_largest(mean_WLG: Floats, deviation_WLG: Floats) -> Floats:
    """Return the mean of the largest of independent normal numbers, [W][L]."""
    low_WL = (mean_WLG - WIDTH * deviation_WLG).max(axis=2)
    high_WL = (mean_WLG + WIDTH * deviation_WLG).max(axis=2)
    below_WLX = np.zeros((*low_WL.shape, POINTS))
    part_X = np.linspace(0.0, 1.0, POINTS)
    at_WLX = low_WL[..., None] + (high_WL - low_WL)[..., None] * part_X
    for mean_WL, deviation_WL in zip(
        np.moveaxis(mean_WLG, 2, 0), np.moveaxis(deviation_WLG, 2, 0), strict=True
    ):
        spread_WL = np.maximum(deviation_WL, 1e-9 * np.maximum(mean_WL, 1e-300))
        z_WLX = np.clip((at_WLX - mean_WL[..., None]) / spread_WL[..., None], -8.0, 8.0)
        # The usual hyperbolic guess of the normal distribution, true to 3e-4.
        chance_WLX = 0.5 + 0.5 * np.tanh(np.sqrt(2.0 / np.pi) * (z_WLX + 0.044715 * z_WLX**3))
        below_WLX += np.log(np.maximum(chance_WLX, 1e-300))
    above_WLX = -np.expm1(below_WLX)
    area_WL = (0.5 * (above_WLX[..., 1:] + above_WLX[..., :-1])).mean(axis=2)
    return np.asarray(low_WL + (high_WL - low_WL) * area_WL)


def layer_weights(problem: BalanceProblem) -> Floats:
    """Share of a workload's imbalance that one second of any of its layers makes, [W]."""
    return np.asarray(1.0 / problem.mean_WL.sum(axis=1))


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


def robust_value(problem: BalanceProblem, imbalance_W: Floats) -> float:
    """The imbalances of the workloads as one number; grows with each of them."""
    return float(imbalance_W @ robust_slope(problem, imbalance_W))


def value_of(problem: BalanceProblem, time_WL: Floats) -> float:
    """The objective of layers whose most-loaded ranks take `time_WL`; grows with each of them."""
    return robust_value(problem, time_WL.sum(axis=1) * layer_weights(problem))


def planning_loads(problem: BalanceProblem) -> Floats:
    """The load for rules that take a single workload, [L][E]: the weighted mean.

    Every workload counts by its weight, whatever its number of recorded tokens.
    """
    factor_W = problem.weight_W * layer_weights(problem)
    return np.asarray(np.einsum("w,wle->le", factor_W, problem.load_WLE))
