"""Try every placement of every layer: the oracle on tiny instances; for tests only."""

import itertools
import math

import numpy as np

from solvers.placement.chain import check
from solvers.placement.chain.problem import ChainProblem
from solvers.placement.ranks import Placement
from solvers.placement.single import every_way, placed
from solvers.result import Claim, Status


def solve(problem: ChainProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Placement]:
    """Return the best allowed placement, or the proof that there is none."""
    ways_XE = every_way(tuple(problem.ranks.slots_G.tolist()))
    best, best_objective = None, math.inf
    for rows in itertools.product(ways_XE, repeat=problem.num_layers):
        placement = placed(np.array(rows))
        value = check.objective(problem, placement)
        if value < best_objective and not check.violations(problem, placement):
            best, best_objective = placement, value
    status = Status.INFEASIBLE if best is None else Status.OPTIMAL
    return Claim(status=status, solution=best, bound=best_objective)
