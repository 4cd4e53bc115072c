"""Every registered method meets the oracle, on the same instances."""

import functools
from collections import Counter

import numpy as np
import pytest

from solvers.layout.problem import Layout, LayoutProblem
from solvers.registry import LAYOUT
from solvers.result import Outcome, Status
from tests.solvers.layout import brute_force
from tests.solvers.layout.testing import interleaved_problem, large_problem, tiny_problem

SEEDS = range(96)
TIME_LIMIT_S = 60.0


@functools.cache
def instance(seed: int) -> LayoutProblem:
    return tiny_problem(np.random.default_rng(seed))


@functools.cache
def expected(seed: int) -> Outcome[Layout]:
    problem = instance(seed)
    claim = brute_force.solve(problem, time_limit_s=TIME_LIMIT_S)
    return LAYOUT.checked(problem, claim, method="brute_force", solve_s=0.0)


def is_outside(method: str, problem: LayoutProblem) -> bool:
    """What a method's docstring excludes."""
    return method == "exact" and problem.stages_per_device > 1 and problem.fixed_layout is None


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", LAYOUT.methods)
def test_meets_the_oracle(method: str, seed: int) -> None:
    problem = instance(seed)
    outcome = LAYOUT.solve(problem, method=method, time_limit_s=TIME_LIMIT_S)
    if is_outside(method, problem):
        assert outcome.status is Status.UNKNOWN
        return
    assert outcome.status is expected(seed).status
    assert outcome.objective == pytest.approx(expected(seed).objective, rel=1e-9)
    assert outcome.gap_ratio <= 1e-6 or outcome.status is Status.INFEASIBLE


def test_the_instances_cover_every_feature() -> None:
    seen = Counter[str]()
    for seed in SEEDS:
        problem = instance(seed)
        seen[f"runs {problem.num_runs}"] += 1
        seen[f"stages {problem.num_stages}"] += 1
        seen[f"per device {problem.stages_per_device}"] += 1
        seen[f"uniform {problem.uniform_option}"] += 1
        seen[f"fixed {problem.fixed_layout is not None}"] += 1
        seen[f"fewest {problem.min_layers_per_stage}"] += 1
        seen[f"{expected(seed).status}"] += 1
    features = {
        *("runs 1", "runs 2", "stages 1", "stages 2", "stages 3", "stages 4"),
        *("per device 1", "per device 2", "uniform True", "uniform False"),
        *("fixed True", "fixed False", "fewest 0", "fewest 1", "optimal", "infeasible"),
    }
    assert min(seen[feature] for feature in features) >= 6, seen


@pytest.mark.parametrize("method", LAYOUT.methods)
def test_solves_a_very_large_model(method: str) -> None:
    outcome = LAYOUT.solve(large_problem(), method=method, time_limit_s=TIME_LIMIT_S)
    assert outcome.status is Status.OPTIMAL
    assert outcome.objective == pytest.approx(10.17716, rel=1e-6)


@pytest.mark.parametrize("method", [method for method in LAYOUT.methods if method != "exact"])
def test_a_time_limited_incumbent_is_never_called_optimal(method: str) -> None:
    outcome = LAYOUT.solve(interleaved_problem(), method=method, time_limit_s=1.5)
    assert outcome.status is Status.FEASIBLE
    assert 0.0 < outcome.bound < outcome.objective * (1 - 1e-6)
