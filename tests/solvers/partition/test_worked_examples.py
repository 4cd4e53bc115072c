import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.partition.problem import PartitionProblem
from solvers.registry import PARTITION
from solvers.result import Status
from tests.expect import present
from tests.solvers.partition.testing import tiny_problem, two_pools

TIME_LIMIT_S = 60.0


def test_the_slower_pool_gets_fewer_layers() -> None:
    outcome = PARTITION.solve(two_pools(), time_limit_s=TIME_LIMIT_S)
    assert outcome.status is Status.OPTIMAL
    layers_of = Counter[int]()
    for stage in present(outcome.solution).stages:
        layers_of[stage.pool] += stage.layers
    # 8 stages of 6 layers take 0.096 s each; 2 layers take 0.071 s on the slower pool.
    assert layers_of == {0: 48, 1: 13}
    # 48 * 0.016 + 13 * 0.016 / 0.45 + 2 (13 * 0.001 + 0.008) + 63 * 0.096
    assert outcome.objective == pytest.approx(7.32022, rel=1e-5)


def test_a_link_that_is_too_slow_leaves_its_pool_out() -> None:
    problem = two_pools(hop_s_PP=[[0.001, 9.0], [9.0, 0.001]], memory_limit_bytes_P=[2e12, 2e12])
    outcome = PARTITION.solve(problem, time_limit_s=TIME_LIMIT_S)
    assert {stage.pool for stage in present(outcome.solution).stages} == {0}


def test_out_of_time_is_never_called_optimal() -> None:
    assert PARTITION.solve(two_pools(), time_limit_s=1e-6).status is Status.UNKNOWN


@settings(deadline=None, max_examples=30, derandomize=True)
@given(seed=st.integers(10_000, 20_000), extra_bytes=st.integers(1, 40))
def test_more_memory_never_hurts(seed: int, extra_bytes: int) -> None:
    problem = tiny_problem(np.random.default_rng(seed))
    roomier = dataclasses.replace(
        problem, memory_limit_bytes_P=problem.memory_limit_bytes_P + extra_bytes
    )
    before = PARTITION.solve(problem, time_limit_s=TIME_LIMIT_S)
    after = PARTITION.solve(roomier, time_limit_s=TIME_LIMIT_S)
    assert after.objective <= before.objective * (1 + 1e-9)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(seed=st.integers(10_000, 20_000))
def test_the_order_of_the_pools_changes_nothing(seed: int) -> None:
    problem = tiny_problem(np.random.default_rng(seed))
    order = np.random.default_rng(seed).permutation(problem.num_pools)
    shuffled = PartitionProblem(
        pools=tuple(problem.pools[p] for p in order),
        max_stages_P=tuple(problem.max_stages_P[p] for p in order),
        time_s_PL=problem.time_s_PL[order],
        static_bytes_PL=problem.static_bytes_PL[order],
        saved_bytes_PL=problem.saved_bytes_PL[order],
        memory_limit_bytes_P=problem.memory_limit_bytes_P[order],
        hop_s_PP=problem.hop_s_PP[np.ix_(order, order)],
        num_microbatches=problem.num_microbatches,
    )
    before = PARTITION.solve(problem, time_limit_s=TIME_LIMIT_S)
    after = PARTITION.solve(shuffled, time_limit_s=TIME_LIMIT_S)
    assert after.objective == pytest.approx(before.objective, rel=1e-9)
