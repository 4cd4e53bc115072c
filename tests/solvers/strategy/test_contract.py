"""Every registered method meets the oracle, on the same instances."""

import functools
from collections import Counter

import numpy as np
import pytest

from solvers.registry import STRATEGY
from solvers.result import Outcome, Status
from solvers.strategy.problem import Strategy, StrategyProblem
from tests.solvers.strategy import brute_force
from tests.solvers.strategy.testing import tiny_strategies

SEEDS = range(60)
TIME_LIMIT_S = 60.0


@functools.cache
def instance(seed: int) -> StrategyProblem:
    return tiny_strategies(np.random.default_rng(seed))


@functools.cache
def expected(seed: int) -> Outcome[Strategy]:
    problem = instance(seed)
    claim = brute_force.solve(problem, time_limit_s=TIME_LIMIT_S)
    return STRATEGY.checked(problem, claim, method="brute_force", solve_s=0.0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", STRATEGY.methods)
def test_meets_the_oracle(method: str, seed: int) -> None:
    outcome = STRATEGY.solve(instance(seed), method=method, time_limit_s=TIME_LIMIT_S)
    assert outcome.status is expected(seed).status
    assert outcome.objective == pytest.approx(expected(seed).objective, rel=1e-9)
    assert outcome.gap_ratio <= 1e-6 or outcome.status is Status.INFEASIBLE


def test_the_instances_cover_every_case() -> None:
    seen = Counter[str]()
    for seed in SEEDS:
        problem, solved = instance(seed), expected(seed)
        seen[f"strategies {len(problem.layouts_K)}"] += 1
        seen[solved.status] += 1
        if solved.solution is not None and solved.solution.index > 0:
            seen["not the first"] += 1
        per_device = {layout.stages_per_device for layout in problem.layouts_K}
        seen[f"kinds of pipeline {len(per_device)}"] += 1
    wanted = {
        *("strategies 1", "strategies 4", "kinds of pipeline 2"),
        *("optimal", "infeasible", "not the first"),
    }
    assert min(seen[feature] for feature in wanted) >= 4, seen


@pytest.mark.parametrize("method", STRATEGY.methods)
def test_nothing_fits_is_proven(method: str) -> None:
    seeds = [seed for seed in SEEDS if expected(seed).status is Status.INFEASIBLE]
    assert seeds
    outcome = STRATEGY.solve(instance(seeds[0]), method=method, time_limit_s=TIME_LIMIT_S)
    assert (outcome.status, outcome.solution) == (Status.INFEASIBLE, None)
