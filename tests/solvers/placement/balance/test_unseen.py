import dataclasses

import numpy as np

from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.balance.unseen import MOST_RATIO, chance_ratio, with_unseen
from solvers.placement.ranks import Floats, Ranks
from tests.solvers.placement.balance.testing import even_weights, families

RANKS = Ranks.uniform(ranks=4, slots_per_rank=20)


def problem_of(load_WLE: Floats) -> BalanceProblem:
    return BalanceProblem(load_WLE=load_WLE, weight_W=even_weights(len(load_WLE)), ranks=RANKS)


def test_workloads_that_agree_are_taken_at_their_word() -> None:
    loads = families(np.random.default_rng(0), num_families=4, num_layers=3, num_experts=64)
    agreeing = problem_of(loads)
    assert chance_ratio(agreeing) < 0.1
    assert with_unseen(agreeing) is agreeing


def test_one_workload_says_nothing_of_others() -> None:
    loads = families(np.random.default_rng(0), num_families=1, num_layers=3, num_experts=64)
    assert with_unseen(problem_of(loads)).num_workloads == 1


def test_workloads_without_anything_in_common_weigh_half() -> None:
    problem = problem_of(np.random.default_rng(0).lognormal(0.0, 0.8, (2, 40, 64)))
    # Independent: the mean varies by just what chance leaves of it.
    assert chance_ratio(problem) > 0.8
    more = with_unseen(problem)
    assert np.allclose(more.weight_W, [1 / 6, 1 / 6, 1 / 3, 1 / 3])
    assert MOST_RATIO == 0.5
    total_L = problem.load_WLE.sum(axis=2).mean(axis=0)
    expected_LE, even_LE = more.load_WLE[2:]
    for load_LE in (expected_LE, even_LE):
        assert np.allclose(load_LE.sum(axis=1), total_L)
    assert np.ptp(even_LE, axis=1).max() == 0.0
    # Half way on a logarithmic scale: the same order of experts, a narrower range.
    known_LE = problem.load_WLE.mean(axis=0)
    assert np.log(expected_LE).std() < 0.7 * np.log(known_LE).std()
    assert np.corrcoef(expected_LE.ravel(), known_LE.ravel())[0, 1] > 0.9


def test_the_unit_of_the_loads_does_not_matter() -> None:
    problem = problem_of(np.random.default_rng(1).exponential(1.0, (3, 2, 64)))
    scaled = dataclasses.replace(
        problem, load_WLE=problem.load_WLE * np.array([1.0, 100.0, 0.01])[:, None, None]
    )
    assert np.isclose(chance_ratio(problem), chance_ratio(scaled))
