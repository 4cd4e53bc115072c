"""Solve the layouts strategy by strategy, best bound first, until the bounds end it.

The plain way to do what the integer program (`milp.py`) does at once: the layout of each strategy
is a problem of its own, and once the least that the next strategy could take exceeds the best found
(solvers/layout/patterns.py `least_objective_s`), the rest is proven worse. Proves optimality when
every layout solve does. As many layout solves as strategies in the worst case.
"""

import math
import time

from solvers.layout import check as layout_check
from solvers.layout import milp
from solvers.layout.patterns import least_objective_s
from solvers.result import Claim, Status
from solvers.strategy.problem import Strategy, StrategyProblem


def solve(problem: StrategyProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Strategy]:
    """Return the best strategy found, with the smallest bound of what is left."""
    deadline_s = time.perf_counter() + time_limit_s
    least_s_K = [
        once_s + least_objective_s(layout)
        for once_s, layout in zip(problem.once_s_K, problem.layouts_K, strict=True)
    ]
    best, best_s, bound_s = None, math.inf, math.inf
    for index in sorted(range(len(least_s_K)), key=least_s_K.__getitem__):
        left_s = deadline_s - time.perf_counter()
        if least_s_K[index] >= best_s:
            break
        if left_s <= 0.0:
            bound_s = min(bound_s, least_s_K[index])
            break
        layout = problem.layouts_K[index]
        claim = milp.solve(layout, time_limit_s=left_s, threads=threads)
        bound_s = min(bound_s, problem.once_s_K[index] + claim.bound)
        if claim.solution is None:
            continue
        value_s = problem.once_s_K[index] + layout_check.objective(layout, claim.solution)
        if value_s < best_s:
            best, best_s = Strategy(index=index, layout=claim.solution), value_s
    if best is None:
        is_proven = math.isinf(bound_s)
        status = Status.INFEASIBLE if is_proven else Status.UNKNOWN
        return Claim(status=status, solution=None, bound=bound_s)
    bound_s = min(bound_s, best_s)
    status = Status.OPTIMAL if bound_s >= best_s * (1.0 - 1e-6) else Status.FEASIBLE
    return Claim(status=status, solution=best, bound=bound_s)
