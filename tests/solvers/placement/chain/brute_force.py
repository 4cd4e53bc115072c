"""Try every placement of every layer: the oracle on tiny instances; for tests only."""

import itertools

import numpy as np

from solvers.placement.chain import check
from solvers.placement.chain.problem import ChainProblem
from solvers.placement.ranks import Placement, placed
from solvers.result import Claim
from tests.solvers.exhaustion import best_of
from tests.solvers.placement.testing import all_assignments


def solve(problem: ChainProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Placement]:
    """Return the best allowed placement, or the proof that there is none."""
    rank_XE = all_assignments(tuple(problem.ranks.slots_G.tolist()))
    return best_of(
        (placed(np.array(rows)) for rows in itertools.product(rank_XE, repeat=problem.num_layers)),
        violations=lambda each: check.violations(problem, each),
        objective=lambda each: check.objective(problem, each),
    )
