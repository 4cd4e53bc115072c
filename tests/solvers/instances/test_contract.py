"""Every registered method meets the oracle, on the same instances."""

import dataclasses
import functools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.errors import RejectedClaimError
from solvers.instances.check import devices
from solvers.instances.problem import (
    InstancePlan,
    InstancesProblem,
    Link,
    Objective,
    Pool,
    Role,
    Route,
)
from solvers.registry import INSTANCES
from solvers.result import Claim, Outcome, Status
from tests.solvers.instances import brute_force
from tests.solvers.instances.testing import mixed_pool, one_pool, tiny_problem

SEEDS = range(24)
TIME_LIMIT_S = 60.0


@functools.cache
def instance(objective: Objective, seed: int) -> InstancesProblem:
    return tiny_problem(np.random.default_rng([seed, list(Objective).index(objective)]), objective)


@functools.cache
def expected(objective: Objective, seed: int) -> Outcome[InstancePlan]:
    problem = instance(objective, seed)
    claim = brute_force.solve(problem, time_limit_s=TIME_LIMIT_S)
    return INSTANCES.checked(problem, claim, method="brute_force", solve_s=0.0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("method", INSTANCES.methods)
def test_meets_the_oracle(method: str, objective: Objective, seed: int) -> None:
    outcome = INSTANCES.solve(instance(objective, seed), method=method, time_limit_s=TIME_LIMIT_S)
    right = expected(objective, seed)
    assert outcome.status is right.status
    assert outcome.objective == pytest.approx(right.objective, rel=2e-6)
    assert outcome.bound <= right.objective * (1.0 + 1e-9)


def test_the_instances_cover_every_feature() -> None:
    seen = Counter[str]()
    for objective in Objective:
        for seed in SEEDS:
            problem, outcome = instance(objective, seed), expected(objective, seed)
            seen[str(outcome.status)] += 1
            seen["limited kinds"] += problem.max_kinds is not None
            seen["islands"] += len({group.island for group in problem.groups}) > 1
            if outcome.solution is None:
                continue
            plan = outcome.solution
            used = [j for j, count in enumerate(plan.count_J) if count]
            seen["several classes"] += len(problem.share_C) > 1
            seen["handed over"] += sum(plan.flow_per_s_E) > 0.0
            seen["aggregated"] += plan.aggregated_per_s > 0.0
            seen["both"] += 0.0 < plan.aggregated_per_s < plan.rate_per_s * (1.0 - 1e-9)
            seen["several pools"] += len([n for n in devices(problem, plan) if n]) > 1
            seen["a column over two pools"] += any(
                min(problem.columns[j].devices_P) > 0 for j in used if len(problem.pools) > 1
            )
            seen["a full link"] += _fills_a_link(problem, plan)
    assert min(seen.values()) >= 2, seen
    assert len(seen) == 11, seen


def _fills_a_link(problem: InstancesProblem, plan: InstancePlan) -> bool:
    used_K = [0.0] * len(problem.links)
    for flow, route in zip(plan.flow_per_s_E, problem.routes, strict=True):
        for link in route.links:
            used_K[link] += flow * route.request_bytes
    return any(
        used > 0.999 * link.bytes_per_s for used, link in zip(used_K, problem.links, strict=True)
    )


@pytest.mark.parametrize("method", INSTANCES.methods)
def test_two_prefill_for_one_decode(method: str) -> None:
    # DistServe, section 2: 5.6 and 10 requests/s make 2P + 1D serve 10 on three devices.
    outcome = INSTANCES.solve(one_pool(), method=method, time_limit_s=TIME_LIMIT_S)
    assert outcome.status is Status.OPTIMAL
    assert outcome.solution is not None
    assert outcome.solution.count_J == (2, 1)
    each = one_pool(objective=Objective.DEVICE_TIME, demand_per_s=0.0, pools=(three_devices(),))
    best = INSTANCES.solve(each, method=method, time_limit_s=TIME_LIMIT_S)
    assert best.status is Status.OPTIMAL
    assert 1.0 / best.objective == pytest.approx(10.0 / 3.0, rel=1e-5)  # goodput per device


def three_devices() -> Pool:
    return Pool(name="a100", devices=3)


@pytest.mark.parametrize("method", INSTANCES.methods)
def test_the_fastest_plan_holds_nothing_idle(method: str) -> None:
    # 12 devices: 8P + 4D serve min(44.8, 40) = 40, 7P + 5D serve 39.2.
    problem = one_pool(objective=Objective.RATE, demand_per_s=0.0, spare_ratio=0.25)
    outcome = INSTANCES.solve(problem, method=method, time_limit_s=TIME_LIMIT_S)
    assert outcome.solution is not None
    assert 1.0 / outcome.objective == pytest.approx(40.0 / 1.25, rel=1e-5)
    assert outcome.solution.count_J == (8, 4)
    # A link for 20 requests/s leaves half of the pool without use: 4P + 2D serve 20.
    thin = dataclasses.replace(
        problem,
        links=(Link(name="thin", bytes_per_s=20e9),),
        routes=(Route(sender=0, receiver=1, request_bytes=1e9, links=(0,)),),
    )
    outcome = INSTANCES.solve(thin, method=method, time_limit_s=TIME_LIMIT_S)
    assert outcome.status is Status.OPTIMAL
    assert outcome.solution is not None
    assert outcome.solution.count_J == (4, 2)


def test_what_cannot_be_served_is_infeasible() -> None:
    problem = one_pool(demand_per_s=41.0)
    for method in INSTANCES.methods:
        outcome = INSTANCES.solve(problem, method=method, time_limit_s=TIME_LIMIT_S)
        assert outcome.status is Status.INFEASIBLE
        severed = dataclasses.replace(problem, routes=(), objective=Objective.RATE, demand_per_s=0)
        cut = INSTANCES.solve(severed, method=method, time_limit_s=TIME_LIMIT_S)
        assert cut.status is Status.INFEASIBLE


def test_a_mixed_pool_is_solved_to_optimality() -> None:
    problem = mixed_pool()
    outcome = INSTANCES.solve(problem, time_limit_s=TIME_LIMIT_S)
    assert outcome.status is Status.OPTIMAL
    assert outcome.solution is not None
    used = {problem.role_of(j) for j, count in enumerate(outcome.solution.count_J) if count}
    assert used >= {Role.PREFILL, Role.DECODE}


@settings(deadline=None, max_examples=20, derandomize=True)
@given(seed=st.integers(1_000, 9_000), objective=st.sampled_from(Objective))
def test_more_devices_never_hurt(seed: int, objective: Objective) -> None:
    problem = instance(objective, seed)
    pools = tuple(dataclasses.replace(pool, devices=pool.devices + 1) for pool in problem.pools)
    before = INSTANCES.solve(problem, time_limit_s=TIME_LIMIT_S)
    after = INSTANCES.solve(dataclasses.replace(problem, pools=pools), time_limit_s=TIME_LIMIT_S)
    assert after.objective <= before.objective * (1.0 + 2e-6)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(seed=st.integers(1_000, 9_000), objective=st.sampled_from(Objective))
def test_the_order_of_the_columns_changes_nothing(seed: int, objective: Objective) -> None:
    problem = instance(objective, seed)
    order = np.random.default_rng(seed).permutation(len(problem.columns))
    shuffled = dataclasses.replace(problem, columns=tuple(problem.columns[j] for j in order))
    before = INSTANCES.solve(problem, time_limit_s=TIME_LIMIT_S)
    after = INSTANCES.solve(shuffled, time_limit_s=TIME_LIMIT_S)
    assert after.objective == pytest.approx(before.objective, rel=2e-6)


def test_false_claims_are_refused() -> None:
    problem = one_pool()
    starved = InstancePlan(
        count_J=(1, 1), flow_per_s_E=(10.0,), aggregated_per_s=0.0, rate_per_s=10.0
    )
    with pytest.raises(RejectedClaimError, match=r"group 'prefill' is handed 10\.0 requests/s"):
        INSTANCES.checked(
            problem,
            Claim(status=Status.OPTIMAL, solution=starved, bound=0.0),
            method="lie",
            solve_s=0.0,
        )


@pytest.mark.parametrize("method", INSTANCES.methods)
@pytest.mark.parametrize("demand_per_s", [0.01, 5.6, 1000.0])
def test_a_large_pool_serves_a_demand_of_any_size(method: str, demand_per_s: float) -> None:
    problem = one_pool(pools=(Pool(name="a100", devices=4096),), demand_per_s=demand_per_s)
    outcome = INSTANCES.solve(problem, method=method, time_limit_s=TIME_LIMIT_S)
    assert outcome.status is Status.OPTIMAL
    assert outcome.objective == math.ceil(demand_per_s / 5.6) + math.ceil(demand_per_s / 10.0)
