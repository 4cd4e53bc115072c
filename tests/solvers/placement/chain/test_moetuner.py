"""Both integer programs meet every clustering, and every naming of clusters, tried one by one."""

import dataclasses
import itertools

import numpy as np
import pytest

from solvers.placement.balance.eplb import eplb
from solvers.placement.chain.moetuner import (
    balanced_clusters,
    cluster_flows,
    clusters_to_ranks,
    solve,
)
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.ranks import Floats, Ints, Ranks
from solvers.registry import CHAIN
from solvers.result import Status
from tests.expect import present
from tests.seeds import seeds
from tests.solvers.placement.chain import brute_force
from tests.solvers.placement.chain.testing import latent_clusters
from tests.solvers.placement.testing import rank_of_expert

TIME_LIMIT_S = 60.0


def chain(seed: int, *, layers: int = 3) -> ChainProblem:
    return dataclasses.replace(
        latent_clusters(
            np.random.default_rng(seed),
            num_layers=layers,
            num_experts=6,
            ranks=Ranks.uniform(ranks=3, slots_per_rank=2),
        ),
        measure=Measure.MOST_LOADED_PAIR,
    )


def unevenness(load_E: Floats, cluster_E: Ints, num_clusters: int) -> float:
    tokens_C = np.bincount(cluster_E, load_E, minlength=num_clusters)
    return float(np.abs(tokens_C - tokens_C.mean()).sum())


def least_unevenness(load_E: Floats, num_clusters: int) -> float:
    best = np.inf
    for row in itertools.product(range(num_clusters), repeat=len(load_E)):
        size_C = np.bincount(row, minlength=num_clusters)
        if size_C.max() == size_C.min():
            best = min(best, unevenness(load_E, np.array(row), num_clusters))
    return best


@pytest.mark.parametrize("seed", seeds(4, default=2))
def test_clusters_are_as_even_as_any(seed: int) -> None:
    problem = chain(seed)
    actual = balanced_clusters(problem, time_limit_s=TIME_LIMIT_S)
    assert actual.status is Status.OPTIMAL
    least = [least_unevenness(load_E, 3) for load_E in problem.load_LE]
    reached = [
        unevenness(load_E, row_E, 3)
        for load_E, row_E in zip(problem.load_LE, present(actual.number_LE), strict=True)
    ]
    assert reached == pytest.approx(least, abs=1e-6)
    assert actual.bound == pytest.approx(sum(least), abs=1e-5)
    assert actual.bound <= sum(reached)


def peak_pair_cost(
    problem: ChainProblem, flow_TCC: Floats, rank_LC: tuple[tuple[int, ...], ...]
) -> float:
    total = 0.0
    for flow_CC, here, there in zip(flow_TCC, rank_LC[:-1], rank_LC[1:], strict=True):
        total += (flow_CC * problem.cost_GG[np.ix_(here, there)]).max()
    return total


@pytest.mark.parametrize("seed", seeds(4, default=1))
def test_clusters_are_named_as_well_as_can_be(seed: int) -> None:
    problem = chain(seed)
    clusters = balanced_clusters(problem, time_limit_s=TIME_LIMIT_S)
    actual = clusters_to_ranks(problem, present(clusters.number_LE), time_limit_s=TIME_LIMIT_S)
    flow_TCC = cluster_flows(problem, present(clusters.number_LE))
    names = itertools.product(itertools.permutations(range(3)), repeat=3)
    best = min(peak_pair_cost(problem, flow_TCC, rank_LC) for rank_LC in names)
    chosen = tuple(tuple(row) for row in present(actual.number_LE).tolist())
    assert peak_pair_cost(problem, flow_TCC, chosen) == pytest.approx(best, rel=1e-5)
    assert actual.bound <= best * (1 + 1e-9)
    assert actual.status is Status.OPTIMAL


def test_the_second_program_agrees_with_every_naming_of_clusters() -> None:
    problem = chain(7, layers=2)
    outcome = CHAIN.solve(problem, method="moetuner", time_limit_s=TIME_LIMIT_S)
    flow_TCC = cluster_flows(problem, rank_of_expert(present(outcome.solution), problem.ranks))
    of_clusters = ChainProblem(
        flow_TEE=flow_TCC,
        load_LE=np.ones((2, 3)),
        ranks=Ranks.uniform(ranks=3, slots_per_rank=1),
        cost_GG=problem.cost_GG,
        measure=Measure.MOST_LOADED_PAIR,
    )
    exact = brute_force.solve(of_clusters, time_limit_s=TIME_LIMIT_S)
    assert outcome.objective == pytest.approx(exact.bound, rel=1e-5)


def test_a_limit_below_the_heaviest_expert_is_infeasible() -> None:
    problem = chain(1)
    limit_L = 0.9 * problem.load_LE.max(axis=1)
    claim = solve(dataclasses.replace(problem, most_load_L=limit_L), time_limit_s=TIME_LIMIT_S)
    assert claim.status is Status.INFEASIBLE


def test_limits_that_the_program_cannot_keep_in_time_are_kept_by_swaps() -> None:
    # 32 experts on 4 ranks, each at most what EPLB's rule gives one: CBC finds nothing in 20 s.
    ranks = Ranks.uniform(ranks=4, slots_per_rank=8, ranks_per_node=2)
    problem = latent_clusters(np.random.default_rng(1), num_layers=3, num_experts=32, ranks=ranks)
    by_rule_LG = np.add.reduceat(
        np.take_along_axis(problem.load_LE, eplb(problem.load_LE, ranks=ranks).expert_LS, axis=1),
        ranks.first_slot_G,
        axis=1,
    )
    problem = dataclasses.replace(problem, most_load_L=by_rule_LG.max(axis=1))
    outcome = CHAIN.solve(problem, method="moetuner", time_limit_s=2.0)
    assert outcome.status is Status.FEASIBLE
    assert outcome.bound <= outcome.objective
