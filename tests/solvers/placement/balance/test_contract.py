"""Every registered method meets the oracle, on the same instances."""

import dataclasses
import functools
from collections import Counter

import numpy as np
import pytest

from solvers.placement.balance.problem import BalanceProblem, Robust
from solvers.placement.ranks import Placement, Ranks
from solvers.registry import BALANCE
from solvers.result import Outcome, Status
from tests.solvers.placement.balance import brute_force
from tests.solvers.placement.balance.testing import tiny_problem

SEEDS = range(40)
TIME_LIMIT_S = 60.0

EXACT = ("cp_sat", "milp")
"""Methods that prove optimality."""

RULES = ("lpt", "eplb")
"""Methods whose docstring leaves out limits on migration."""


@functools.cache
def instance(seed: int) -> BalanceProblem:
    return tiny_problem(np.random.default_rng(seed))


@functools.cache
def expected(seed: int) -> Outcome[Placement]:
    claim = brute_force.solve(instance(seed), time_limit_s=TIME_LIMIT_S)
    return BALANCE.checked(instance(seed), claim, method="brute_force", solve_s=0.0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", BALANCE.methods)
def test_meets_the_oracle(method: str, seed: int) -> None:
    problem, best = instance(seed), expected(seed)
    outcome = BALANCE.solve(problem, method=method, time_limit_s=TIME_LIMIT_S)
    if method in RULES and problem.migration is not None:
        assert outcome.status is Status.UNKNOWN
        return
    if method in EXACT or best.status is Status.INFEASIBLE:
        assert outcome.status is best.status
        assert outcome.objective == pytest.approx(best.objective, rel=1e-6)
        return
    assert outcome.status.has_solution
    assert outcome.objective >= best.objective * (1.0 - 1e-9)
    assert outcome.bound <= best.objective * (1.0 + 1e-9)


def test_the_instances_cover_every_feature() -> None:
    seen = Counter[str]()
    for seed in SEEDS:
        problem = instance(seed)
        seen[f"robust {problem.robust}"] += 1
        seen[f"workloads {problem.num_workloads}"] += 1
        seen[f"migration {problem.migration is not None}"] += 1
        seen[f"active {problem.active_load > 0.0}"] += 1
        seen[f"alike {bool((problem.ranks.speed_G == 1.0).all())}"] += 1
        seen["spare slots"] += problem.ranks.num_slots > problem.num_experts
        seen[str(expected(seed).status)] += 1
    features = {
        *("robust mean", "robust worst", "robust cvar", "workloads 1", "workloads 2"),
        *("workloads 3", "migration True", "migration False", "active True", "active False"),
        *("alike True", "alike False", "spare slots", "optimal"),
    }
    assert min(seen[feature] for feature in features) >= 5, seen


@pytest.mark.parametrize("method", EXACT)
def test_exact_methods_say_so_when_they_leave_a_problem_out(method: str) -> None:
    # CVaR of seven workloads has up to 5040 slopes; the mean of seven has one.
    rng = np.random.default_rng(0)
    mean = BalanceProblem(
        load_WLE=rng.exponential(1.0, (7, 1, 3)),
        weight_W=np.full(7, 1 / 7),
        ranks=Ranks.alike(ranks=2, slots_per_rank=2),
    )
    cvar = dataclasses.replace(mean, robust=Robust.CVAR)
    solved, left_out = (
        BALANCE.solve(problem, method=method, time_limit_s=TIME_LIMIT_S) for problem in (mean, cvar)
    )
    assert solved.status is Status.OPTIMAL
    assert left_out.status is Status.UNKNOWN
