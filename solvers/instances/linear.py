"""Objectives as a short chain of linear programs, with the bound of each carried over.

A backend solves one linear integer program over the rows of `problem.py`:

    minimise  sum_j weight[j] n_j - reward r      with  least <= r (and r = least without a reward)

- COST, DEVICES: the weights of the objective, no reward, r = required.
- RATE: no weights, reward 1. A bound b on -r bounds the objective by (1 + spare) / -b. A second
  program, fewest devices at the rate found, takes out the instances that add nothing.
- DEVICE_TIME, SPENDING: a ratio of two linear functions, by Dinkelbach's steps (Management Science
  13(7), 1967): at the ratio q of the best plan so far, F(q) = min sum_j weight[j] n_j - q r. F(q)
  >= 0 proves q; otherwise the minimiser has a smaller ratio and is the next plan. Superlinear.

Bound of a ratio. Let w be the least weight of any plan that serves at all: a plan of weight W and
rate r with W / r <= q has r >= W / q >= w / q, so that s = max(least, w / q) may be asked of r
without losing it. Let f <= 0 be a proven lower bound of F(q) under r >= s. Then W >= q r + f for
every such plan, W / r >= q + f / r >= q + f / s, and all other plans exceed q.

Letters: J columns.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from solvers.instances import check
from solvers.instances.problem import (
    SHORTFALL_RATIO,
    InstanceObjective,
    InstancePlan,
    InstanceRole,
    InstancesProblem,
)
from solvers.result import Claim, Status

WHOLE = 1.0 - SHORTFALL_RATIO
"""Keeps rounding from cutting off the plan that is the best so far."""

IMPROVEMENT_RATIO = 1e-9
"""Dinkelbach's steps end when the ratio falls by less than this share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One linear program over the rows of a problem."""

    weight_J: tuple[float, ...]
    reward: float
    """For each request/s; 0 fixes the rate at the least."""
    least_per_s: float


SolveLinear = Callable[[Linear], Claim[InstancePlan]]
"""Claims are about the linear objective, which may be negative."""


def solve_by(problem: InstancesProblem, solve_linear: SolveLinear) -> Claim[InstancePlan]:
    """Minimise the problem's objective by linear programs."""
    if problem.objective.rate_is_fixed:
        fixed = Linear(weight_J=problem.weight_J, reward=0.0, least_per_s=least_per_s(problem))
        return solve_linear(fixed)
    fastest = _fastest(problem, solve_linear)
    if problem.objective is InstanceObjective.RATE:
        return _without_idle(problem, fastest, solve_linear)
    return _least_ratio(problem, fastest, solve_linear)


def least_per_s(problem: InstancesProblem) -> float:
    """The required rate less half of what may fall short; the other half is for rounding."""
    return problem.required_per_s * (1.0 - 0.5 * SHORTFALL_RATIO)


def _fastest(problem: InstancesProblem, solve_linear: SolveLinear) -> Claim[InstancePlan]:
    """The most requests from the pools; the bound is on seconds per request."""
    idle = (0.0,) * len(problem.columns)
    claim = solve_linear(Linear(weight_J=idle, reward=1.0, least_per_s=least_per_s(problem)))
    if claim.status is Status.INFEASIBLE:
        return claim
    bound = (1.0 + problem.spare_ratio) / -claim.bound if claim.bound < 0.0 else math.inf
    if claim.solution is None or claim.solution.rate_per_s > 0.0:
        return dataclasses.replace(claim, bound=bound)
    nothing = Status.INFEASIBLE if claim.status is Status.OPTIMAL else Status.UNKNOWN
    is_proven = nothing is Status.INFEASIBLE
    return Claim(status=nothing, solution=None, bound=math.inf if is_proven else bound)


def _without_idle(
    problem: InstancesProblem, fastest: Claim[InstancePlan], solve_linear: SolveLinear
) -> Claim[InstancePlan]:
    if fastest.solution is None:
        return fastest
    fewest = solve_linear(
        Linear(
            weight_J=tuple(float(sum(column.devices_P)) for column in problem.columns),
            reward=0.0,
            least_per_s=fastest.solution.rate_per_s,
        )
    )
    if fewest.solution is None:
        return fastest
    return dataclasses.replace(fastest, solution=fewest.solution)


def _least_ratio(
    problem: InstancesProblem, start: Claim[InstancePlan], solve_linear: SolveLinear
) -> Claim[InstancePlan]:
    best, bound = start.solution, 0.0
    if best is None:
        return dataclasses.replace(start, bound=start.bound if math.isinf(start.bound) else 0.0)
    while True:
        ratio = check.objective(problem, best)
        slowest_per_s = max(least_per_s(problem), least_weight(problem) / ratio * WHOLE)
        claim = solve_linear(
            Linear(weight_J=problem.weight_J, reward=ratio, least_per_s=slowest_per_s)
        )
        bound = max(bound, ratio + min(0.0, claim.bound) / slowest_per_s)
        plan = claim.solution
        falls_to = math.inf if plan is None else check.objective(problem, plan)
        if plan is not None and falls_to < ratio:
            best = plan
        if falls_to >= ratio * (1.0 - IMPROVEMENT_RATIO):
            status = Status.OPTIMAL if claim.status is Status.OPTIMAL else Status.FEASIBLE
            return Claim(status=status, solution=best, bound=bound)


def least_weight(problem: InstancesProblem) -> float:
    """What any plan that serves at all weighs at least: its lightest instances."""
    weight_J = problem.weight_J
    lightest = {
        role: min((weight_J[j] for j in problem.columns_of(role)), default=math.inf)
        for role in InstanceRole
    }
    disaggregated = lightest[InstanceRole.PREFILL] + lightest[InstanceRole.DECODE]
    return min(disaggregated, lightest[InstanceRole.AGGREGATED])
