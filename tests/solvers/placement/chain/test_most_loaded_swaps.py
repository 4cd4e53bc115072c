import dataclasses
import math

import numpy as np
import pytest

from solvers.placement.chain import check
from solvers.placement.chain.bound import lower_bound
from solvers.placement.chain.most_loaded_swaps import changes_EE, descend
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.ranks import Ranks
from solvers.placement.single import placed
from solvers.placement.start_placement import fit
from solvers.registry import CHAIN
from solvers.result import Status
from tests.solvers.placement.chain.testing import latent_clusters


def chain(seed: int) -> ChainProblem:
    problem = latent_clusters(
        np.random.default_rng(seed),
        num_layers=4,
        num_experts=12,
        ranks=Ranks.uniform(ranks=4, slots_per_rank=3, ranks_per_node=2),
    )
    cost_GG = problem.cost_GG + np.triu(np.full((4, 4), 0.5), k=1)
    limit_L = 1.2 * problem.load_LE.sum(axis=1) / 4
    return dataclasses.replace(
        problem, cost_GG=cost_GG, most_load_L=limit_L, measure=Measure.MOST_LOADED_PAIR
    )


def test_every_swap_is_foretold() -> None:
    for layer in range(4):
        problem = chain(layer)
        rank_LE = fit(problem.load_LE, problem.ranks, None).rank_LE
        before = check.objective(problem, placed(rank_LE))
        changed_EE = changes_EE(problem, rank_LE, layer)
        for one, two in np.argwhere(rank_LE[layer][:, None] != rank_LE[layer]):
            swapped_LE = rank_LE.copy()
            swapped_LE[layer, [one, two]] = rank_LE[layer, [two, one]]
            after = check.objective(problem, placed(swapped_LE))
            assert changed_EE[one, two] == pytest.approx(after - before, abs=1e-12)


def test_descending_ends_where_no_allowed_swap_helps() -> None:
    problem = chain(9)
    start_LE = fit(problem.load_LE, problem.ranks, problem.most_load_L).rank_LE
    rank_LE = start_LE.copy()
    descend(problem, rank_LE, deadline_s=math.inf)
    assert not check.violations(problem, placed(rank_LE))
    cost = check.objective(problem, placed(rank_LE))
    assert cost < 0.9 * check.objective(problem, placed(start_LE))
    for layer in range(4):
        for one, two in np.argwhere(changes_EE(problem, rank_LE, layer) < -1e-6):
            swapped_LE = rank_LE.copy()
            swapped_LE[layer, [one, two]] = rank_LE[layer, [two, one]]
            assert check.violations(problem, placed(swapped_LE)) or (
                rank_LE[layer, one] == rank_LE[layer, two]
            )


def test_no_time_changes_nothing() -> None:
    problem = chain(2)
    rank_LE = fit(problem.load_LE, problem.ranks, None).rank_LE
    after_LE = rank_LE.copy()
    descend(problem, after_LE, deadline_s=-math.inf)
    assert (after_LE == rank_LE).all()


def test_one_slow_pair_raises_the_bound_no_higher_than_the_optimum() -> None:
    # One expert a rank: of a uniform flow a third at most stays, and 2/3 leave over six directions
    # of which two are ten times slower: M >= F / (4 + 2 / 10).
    flow_TEE = np.ones((1, 3, 3))
    cost_GG = 1.0 - np.eye(3)
    cost_GG[0, 1] = cost_GG[1, 0] = 10.0
    problem = ChainProblem(
        flow_TEE=flow_TEE,
        load_LE=np.full((2, 3), 3.0),
        ranks=Ranks.uniform(ranks=3, slots_per_rank=1),
        cost_GG=cost_GG,
        measure=Measure.MOST_LOADED_PAIR,
    )
    bound = lower_bound(problem, time_limit_s=5.0)
    assert bound == pytest.approx(6.0 / 4.2)
    outcome = CHAIN.solve(problem, method="exact", time_limit_s=5.0)
    assert outcome.status is Status.OPTIMAL
    assert bound <= outcome.objective == 10.0


def test_total_costs_of_different_links_are_bounded_by_the_least_of_each_kind() -> None:
    problem = chain(3)
    total = dataclasses.replace(problem, measure=Measure.TOTAL)
    # 0.5 more in one direction: no three costs, but least ones of 1 and 6.
    least_GG = np.where(problem.cost_GG == 0.0, 0.0, np.floor(problem.cost_GG))
    three = dataclasses.replace(total, cost_GG=least_GG)
    assert lower_bound(total, time_limit_s=60.0) == lower_bound(three, time_limit_s=60.0) > 0.0
