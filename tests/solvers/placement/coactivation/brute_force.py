"""Try every placement of each layer, one layer after another: the oracle; for tests only."""

import dataclasses
import math

import numpy as np

from solvers.placement.coactivation import check
from solvers.placement.coactivation.problem import CoactivationProblem
from solvers.placement.ranks import Ints, Placement, placed
from solvers.result import Claim, Status
from tests.solvers.placement.testing import all_assignments


def solve(
    problem: CoactivationProblem, *, time_limit_s: float, threads: int = 1
) -> Claim[Placement]:
    """Return the best allowed placement, or the proof that there is none."""
    rows, total = [], 0.0
    for layer in range(problem.num_layers):
        row_S, value = _best_row(_only(problem, layer))
        if row_S is None:
            return Claim(status=Status.INFEASIBLE, solution=None, bound=math.inf)
        rows.append(row_S)
        total += value
    return Claim(status=Status.OPTIMAL, solution=Placement(expert_LS=np.array(rows)), bound=total)


def _only(problem: CoactivationProblem, layer: int) -> CoactivationProblem:
    here = slice(layer, layer + 1)
    return dataclasses.replace(
        problem,
        expert_LTK=problem.expert_LTK[here],
        load_LE=problem.load_LE[here],
        most_load_L=None if problem.most_load_L is None else problem.most_load_L[here],
    )


def _best_row(problem: CoactivationProblem) -> tuple[Ints | None, float]:
    best_S, best = None, math.inf
    for rank_E in all_assignments(tuple(problem.ranks.slots_G.tolist())):
        placement = placed(rank_E[None])
        value = check.objective(problem, placement)
        if value < best and not check.violations(problem, placement):
            best_S, best = placement.expert_LS[0], value
    return best_S, best
