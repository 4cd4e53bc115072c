"""Lower bounds on the time of the most-loaded rank, per workload and layer, and on the objective.

    W workloads   L layers   E experts   G ranks   S slots   r_e copies of expert e, sum_e r_e = S

Write x = max_e load_e / r_e for the largest share of any placement, c for the cost of one replica
(`problem.py`), which grows with the share, and v for speeds. Three things hold for its time T:

 1. the replica with that share is somewhere:                 T >= c(x) / max_g v_g
 2. S slots cannot make the largest share less than x*, which adding copies one by one to the
    largest share reaches (`packing.py`); x* is the least x with sum_e ceil(load_e / x) <= S.
    With 1:                                                       T >= c(x*) / max_g v_g
 3. the ranks share all the work:                                 T >= work(r) / sum_g v_g

Without `active_load` the work is the load whatever r is, and the bound is the larger of 2 and 3:
mean <= T and sum_e ceil(load_e / T) <= S. With it, work(r) = sum_e load_e + a r_e (1 - exp(-load_e
/ r_e)) grows with every r_e, r_e is at least ceil(load_e / x), and each term is concave in r_e (the
perspective of a concave function), so spare copies cost least where all go to one expert: that is
work_least(x), which falls as x grows. For *any* number y therefore

    T >= min(c(y) / max v, work_least(y) / sum v):     x >= y gives the first, x <= y the second.

and no share is above the largest load, which leaves the second alone there. The bound takes the
largest of these over a bisection in y; none of its steps needs to converge.

Where near replicas come first the split is uneven, and drawn where dispatch is static. 1 and 2 hold
in every launch, as the largest share is at least load / r. The work is least where one replica
takes everything, 1 - exp(-x) being concave with value 0 at 0: in place of work_least,
work >= sum_e load_e + a (1 - exp(-load_e)).

Several workloads share one placement: each is bounded alone, and the objective grows with every
layer time, so inserting the bounds bounds it: mean, worst and CVaR. A limit on migration only
removes placements. Not used: that workloads share the copies, that a rank has few slots.
"""

import numpy as np

from solvers.placement.balance import check
from solvers.placement.balance.objective import cost_of, time_weights, value_of
from solvers.placement.balance.packing import copied
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.ranks import Floats, Placement

BISECTIONS = 40
"""Bisection steps; each halves the interval of y, and 40 leave 1e-12 of it."""

ROUNDING_RATIO = 1e-12
"""Share by which a quotient may exceed a whole number and still be taken for it."""


def layer_bounds(problem: BalanceProblem) -> Floats:
    """Least possible time of the most-loaded rank, [W][L]."""
    num_layers, num_experts = problem.num_layers, problem.num_experts
    load_NE = problem.load_WLE.reshape(-1, num_experts)
    least_share_N = least_largest_shares(load_NE, num_slots=problem.ranks.num_slots)
    fastest, speed = float(problem.ranks.speed_G.max()), float(problem.ranks.speed_G.sum())
    bound_N = np.maximum(
        cost_of(least_share_N, problem.active_load) / fastest, load_NE.sum(axis=1) / speed
    )
    if problem.dispatch.is_near:
        reads_N = -problem.active_load * np.expm1(-load_NE).sum(axis=1)
        bound_N = np.maximum(bound_N, (load_NE.sum(axis=1) + reads_N) / speed)
    elif problem.active_load > 0.0:
        bound_N = np.maximum(bound_N, _active_bounds(problem, load_NE, least_share_N))
    return np.asarray(bound_N).reshape(problem.num_workloads, num_layers)


def bound(problem: BalanceProblem) -> float:
    """Least possible objective."""
    return value_of(problem, layer_bounds(problem))


def certificates(problem: BalanceProblem, placement: Placement) -> tuple[Floats, Floats]:
    """Return the share of every layer in the objective, and its bound, both [L].

    A layer's share is the time of its most-loaded rank, each workload counted by how much its
    imbalance counts in the objective at this placement; the bound uses the same counts. For the
    mean the shares sum to the objective and the bounds to its bound. For worst case and CVaR they
    sum to the objective, and the bounds to a number that may lie below `bound`.
    """
    time_WL, bound_WL = check.layer_times(problem, placement), layer_bounds(problem)
    factor_W = time_weights(problem, time_WL)
    return np.asarray(factor_W @ time_WL), np.asarray(factor_W @ bound_WL)


def least_largest_shares(load_LE: Floats, *, num_slots: int) -> Floats:
    """The least x with sum_e ceil(load_e / x) <= num_slots, [L]."""
    return np.asarray(copied(load_LE, num_slots=num_slots)[1].max(axis=1))


def _active_bounds(problem: BalanceProblem, load_NE: Floats, least_share_N: Floats) -> Floats:
    """The largest of min(c(y) / max v, work_least(y) / sum v) over a bisection in y."""
    fastest, speed = float(problem.ranks.speed_G.max()), float(problem.ranks.speed_G.sum())
    low_N, high_N = least_share_N, np.maximum(load_NE.max(axis=1), least_share_N)
    best_N = _least_work(problem, load_NE, high_N) / speed
    share_N = low_N
    for _ in range(BISECTIONS):
        largest_share_N = cost_of(share_N, problem.active_load) / fastest
        total_work_N = _least_work(problem, load_NE, share_N) / speed
        best_N = np.maximum(best_N, np.minimum(largest_share_N, total_work_N))
        low_N = np.where(largest_share_N < total_work_N, share_N, low_N)
        high_N = np.where(largest_share_N < total_work_N, high_N, share_N)
        share_N = 0.5 * (low_N + high_N)
    return best_N


def _least_work(problem: BalanceProblem, load_NE: Floats, share_N: Floats) -> Floats:
    """Work of all ranks when no share is above `share_N`, at least."""
    needed_NE = np.ceil(load_NE / share_N[:, None] * (1.0 - ROUNDING_RATIO))
    needed_NE = np.maximum(needed_NE, 1.0)
    spare_N = np.maximum(problem.ranks.num_slots - needed_NE.sum(axis=1), 0.0)
    reads_NE = _reads(load_NE, needed_NE)
    more_NE = _reads(load_NE, needed_NE + spare_N[:, None]) - reads_NE
    reads_N = reads_NE.sum(axis=1) + more_NE.min(axis=1)
    return np.asarray(load_NE.sum(axis=1) + problem.active_load * reads_N)


def _reads(load_NE: Floats, copies_NE: Floats) -> Floats:
    """Replicas of each expert that any token reaches, on average."""
    return np.asarray(-copies_NE * np.expm1(-load_NE / copies_NE))
