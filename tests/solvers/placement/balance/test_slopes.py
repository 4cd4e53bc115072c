import dataclasses

import numpy as np

from solvers.placement.balance.problem import BalanceProblem, Robust
from solvers.placement.ranks import Ranks
from solvers.registry import BALANCE
from solvers.result import Status


def test_cp_sat_says_so_when_it_leaves_a_problem_out() -> None:
    # CVaR of seven workloads has up to 5040 slopes; the mean of seven has one.
    rng = np.random.default_rng(0)
    mean = BalanceProblem(
        load_WLE=rng.exponential(1.0, (7, 1, 3)),
        weight_W=np.full(7, 1 / 7),
        ranks=Ranks.uniform(ranks=2, slots_per_rank=2),
    )
    cvar = dataclasses.replace(mean, robust=Robust.CVAR)
    solved, left_out = (
        BALANCE.solve(problem, method="cp_sat", time_limit_s=60.0) for problem in (mean, cvar)
    )
    assert solved.status is Status.OPTIMAL
    assert left_out.status is Status.UNKNOWN
