"""Try every layout of every strategy: the oracle for tests on tiny instances.

Proves its answer by exhaustion, so the time limit is not looked at.
"""

import math

from solvers.result import Claim, Status
from solvers.strategy import check
from solvers.strategy.problem import Strategy, StrategyProblem
from tests.solvers.layout.brute_force import layouts


def solve(problem: StrategyProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Strategy]:
    """Return the best allowed strategy, or the proof that there is none."""
    best, best_s = None, math.inf
    for index, of_strategy in enumerate(problem.layouts_K):
        for layout in layouts(of_strategy):
            strategy = Strategy(index=index, layout=layout)
            if check.violations(problem, strategy):
                continue
            value_s = check.objective(problem, strategy)
            if value_s < best_s:
                best, best_s = strategy, value_s
    status = Status.INFEASIBLE if best is None else Status.OPTIMAL
    return Claim(status=status, solution=best, bound=best_s)
