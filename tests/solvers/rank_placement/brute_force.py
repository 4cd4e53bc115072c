"""Try every choice and order of nodes: the oracle on tiny instances; for tests only."""

import itertools
import math
from collections.abc import Iterator

from solvers.rank_placement import check
from solvers.rank_placement.problem import RankPlacement, RankPlacementProblem
from solvers.result import Claim, Status


def solve(
    problem: RankPlacementProblem, *, time_limit_s: float, threads: int = 1
) -> Claim[RankPlacement]:
    """Return the best allowed placement, or the proof that there is none."""
    best, best_objective = None, math.inf
    for placement in placements(problem):
        if check.violations(problem, placement):
            continue
        value = check.objective(problem, placement)
        if value < best_objective:
            best, best_objective = placement, value
    status = Status.INFEASIBLE if best is None else Status.OPTIMAL
    return Claim(status=status, solution=best, bound=best_objective)


def placements(problem: RankPlacementProblem) -> Iterator[RankPlacement]:
    """Every choice and order of nodes, allowed or not."""
    R, S = problem.pipelines, problem.stages
    for nodes in itertools.permutations(range(problem.num_nodes), R * S):
        yield RankPlacement(node_RS=tuple(nodes[r * S : (r + 1) * S] for r in range(R)))
