import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.instances.problem import (
    DevicePool,
    InstanceObjective,
    InstanceRole,
    Route,
    TransferLink,
)
from solvers.registry import INSTANCES
from solvers.result import Status
from tests.expect import present
from tests.solvers.instances.contract import draw
from tests.solvers.instances.testing import mixed_pool, one_pool

TIME_LIMIT_S = 60.0


def test_two_prefill_for_one_decode() -> None:
    # DistServe, section 2: 5.6 and 10 requests/s make 2P + 1D serve 10 on three devices.
    outcome = INSTANCES.solve(one_pool(), time_limit_s=TIME_LIMIT_S)
    assert outcome.status is Status.OPTIMAL
    assert present(outcome.solution).count_J == (2, 1)
    each = one_pool(objective=InstanceObjective.RATE, demand_per_s=0.0, pools=(three_devices(),))
    best = INSTANCES.solve(each, time_limit_s=TIME_LIMIT_S)
    assert best.status is Status.OPTIMAL
    assert 1.0 / best.objective == pytest.approx(10.0, rel=1e-5)


def three_devices() -> DevicePool:
    return DevicePool(name="a100", devices=3)


def test_the_fastest_plan_holds_nothing_idle() -> None:
    # 12 devices: 8P + 4D serve min(44.8, 40) = 40, 7P + 5D serve 39.2.
    problem = one_pool(objective=InstanceObjective.RATE, demand_per_s=0.0, spare_ratio=0.25)
    outcome = INSTANCES.solve(problem, time_limit_s=TIME_LIMIT_S)
    assert 1.0 / outcome.objective == pytest.approx(40.0 / 1.25, rel=1e-5)
    assert present(outcome.solution).count_J == (8, 4)
    # A link for 20 requests/s leaves half of the pool without use: 4P + 2D serve 20.
    thin = dataclasses.replace(
        problem,
        links=(TransferLink(name="thin", bytes_per_s=20e9),),
        routes=(Route(sender=0, receiver=1, request_bytes=1e9, links=(0,)),),
    )
    outcome = INSTANCES.solve(thin, time_limit_s=TIME_LIMIT_S)
    assert outcome.status is Status.OPTIMAL
    assert present(present(outcome.solution)).count_J == (4, 2)


def test_what_cannot_be_served_is_infeasible() -> None:
    problem = one_pool(demand_per_s=41.0)
    severed = dataclasses.replace(
        problem, routes=(), objective=InstanceObjective.RATE, demand_per_s=0
    )
    for each in (problem, severed):
        assert INSTANCES.solve(each, time_limit_s=TIME_LIMIT_S).status is Status.INFEASIBLE


def test_a_mixed_pool_is_solved_to_optimality() -> None:
    problem = mixed_pool()
    outcome = INSTANCES.solve(problem, time_limit_s=TIME_LIMIT_S)
    assert outcome.status is Status.OPTIMAL
    used = {
        problem.role_of(j) for j, count in enumerate(present(outcome.solution).count_J) if count
    }
    assert used >= {InstanceRole.PREFILL, InstanceRole.DECODE}


@settings(deadline=None, max_examples=20, derandomize=True)
@given(seed=st.integers(5_000, 45_000))
def test_more_devices_never_hurt(seed: int) -> None:
    problem = draw(seed)
    pools = tuple(dataclasses.replace(pool, devices=pool.devices + 1) for pool in problem.pools)
    before = INSTANCES.solve(problem, time_limit_s=TIME_LIMIT_S)
    after = INSTANCES.solve(dataclasses.replace(problem, pools=pools), time_limit_s=TIME_LIMIT_S)
    assert after.objective <= before.objective * (1.0 + 2e-6)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(seed=st.integers(5_000, 45_000))
def test_the_order_of_the_columns_changes_nothing(seed: int) -> None:
    problem = draw(seed)
    order = np.random.default_rng(seed).permutation(len(problem.columns))
    shuffled = dataclasses.replace(problem, columns=tuple(problem.columns[j] for j in order))
    before = INSTANCES.solve(problem, time_limit_s=TIME_LIMIT_S)
    after = INSTANCES.solve(shuffled, time_limit_s=TIME_LIMIT_S)
    assert after.objective == pytest.approx(before.objective, rel=2e-6)


def test_a_large_pool_serves_a_demand_of_any_size() -> None:
    for demand_per_s in (0.01, 5.6, 1000.0):
        outcome = INSTANCES.solve(
            one_pool(pools=(DevicePool(name="a100", devices=4096),), demand_per_s=demand_per_s),
            time_limit_s=TIME_LIMIT_S,
        )
        right = math.ceil(demand_per_s / 5.6) + math.ceil(demand_per_s / 10.0)
        assert (outcome.status, outcome.objective) == (Status.OPTIMAL, right), (
            demand_per_s,
            outcome.status,
            outcome.objective,
        )
