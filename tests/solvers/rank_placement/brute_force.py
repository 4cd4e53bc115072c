"""Try every choice and order of nodes: the oracle on tiny instances; for tests only."""

import itertools
from collections.abc import Iterator

from solvers.rank_placement import check
from solvers.rank_placement.problem import RankPlacement, RankPlacementProblem
from solvers.result import Claim
from tests.solvers.exhaustion import best_of


def solve(
    problem: RankPlacementProblem, *, time_limit_s: float, threads: int = 1
) -> Claim[RankPlacement]:
    """Return the best allowed placement, or the proof that there is none."""
    return best_of(
        placements(problem),
        violations=lambda each: check.violations(problem, each),
        objective=lambda each: check.objective(problem, each),
    )


def placements(problem: RankPlacementProblem) -> Iterator[RankPlacement]:
    """Every choice and order of nodes, allowed or not."""
    R, S = problem.pipelines, problem.stages
    for nodes in itertools.permutations(range(problem.num_nodes), R * S):
        yield RankPlacement(node_RS=tuple(nodes[r * S : (r + 1) * S] for r in range(R)))
