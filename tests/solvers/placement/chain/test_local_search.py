import dataclasses
import math

import numpy as np
import pytest

from solvers.placement.chain import check
from solvers.placement.chain.bound import lower_bound
from solvers.placement.chain.clusters import clusters_along_chain
from solvers.placement.chain.local_search import _layer_of, solve, sweep
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.ranks import Ranks, placed
from solvers.placement.swap_search import fit, settle
from solvers.result import Status
from tests.expect import present
from tests.solvers.placement.chain import brute_force
from tests.solvers.placement.chain.contract import clusters
from tests.solvers.placement.chain.testing import latent_clusters


@pytest.fixture(scope="module")
def chain() -> ChainProblem:
    ranks = Ranks.uniform(ranks=8, slots_per_rank=4, ranks_per_node=4)
    problem = latent_clusters(np.random.default_rng(1), num_layers=7, num_experts=32, ranks=ranks)
    return dataclasses.replace(problem, most_load_L=1.1 * problem.load_LE.sum(axis=1) / 8)


def small(seed: int, measure: Measure) -> ChainProblem:
    problem = latent_clusters(
        np.random.default_rng(seed),
        num_layers=4,
        num_experts=12,
        ranks=Ranks.uniform(ranks=4, slots_per_rank=3, ranks_per_node=2),
    )
    cost_GG = problem.cost_GG + np.triu(np.full((4, 4), 0.5), k=1)
    limit_L = 1.2 * problem.load_LE.sum(axis=1) / 4
    return dataclasses.replace(problem, cost_GG=cost_GG, most_load_L=limit_L, measure=measure)


@pytest.mark.parametrize("measure", Measure)
def test_every_swap_is_foretold(measure: Measure) -> None:
    for layer in range(4):
        problem = small(layer, measure)
        rank_LE = present(fit(problem.load_LE, problem.ranks, None))
        before = check.objective(problem, placed(rank_LE))
        changed_EE = _layer_of(problem, rank_LE, layer).changes_EE()
        for one, two in np.argwhere(rank_LE[layer][:, None] != rank_LE[layer]):
            swapped_LE = rank_LE.copy()
            swapped_LE[layer, [one, two]] = rank_LE[layer, [two, one]]
            after = check.objective(problem, placed(swapped_LE))
            assert changed_EE[one, two] == pytest.approx(after - before, abs=1e-12)


@pytest.mark.parametrize("measure", Measure)
def test_sweeping_ends_where_no_allowed_swap_helps(measure: Measure) -> None:
    problem = small(9, measure)
    start_LE = present(fit(problem.load_LE, problem.ranks, problem.most_load_L))
    rank_LE = start_LE.copy()
    sweep(problem, rank_LE, deadline_s=math.inf)
    assert not check.violations(problem, placed(rank_LE))
    cost = check.objective(problem, placed(rank_LE))
    assert cost < 0.9 * check.objective(problem, placed(start_LE))
    for layer in range(4):
        for one, two in np.argwhere(_layer_of(problem, rank_LE, layer).changes_EE() < -1e-6):
            swapped_LE = rank_LE.copy()
            swapped_LE[layer, [one, two]] = rank_LE[layer, [two, one]]
            assert check.violations(problem, placed(swapped_LE)) or (
                rank_LE[layer, one] == rank_LE[layer, two]
            )


def test_no_time_changes_nothing() -> None:
    problem = small(2, Measure.MOST_LOADED_PAIR)
    rank_LE = present(fit(problem.load_LE, problem.ranks, None))
    after_LE = rank_LE.copy()
    sweep(problem, after_LE, deadline_s=-math.inf)
    assert (after_LE == rank_LE).all()


def test_the_dearer_load_above_a_limit_the_less_of_it_stays() -> None:
    free = dataclasses.replace(small(5, Measure.TOTAL), most_load_L=None)
    limited = small(5, Measure.TOTAL)
    assert limited.most_load_L is not None
    above = []
    for over in (0.0, 10.0, 1_000.0):
        rank_LE = clusters_along_chain(free.flow_TEE, num_ranks=4)
        sweep(limited, rank_LE, deadline_s=math.inf, over=over)
        load_LG = np.stack(
            [
                np.bincount(row_E, load_E)
                for row_E, load_E in zip(rank_LE, free.load_LE, strict=True)
            ]
        )
        above.append(float(np.maximum(load_LG - limited.most_load_L[:, None], 0.0).sum()))
    assert above[0] >= above[1] >= above[2]
    assert above[2] < 0.5 * above[0]


def test_unequal_slots_stay_as_they_are() -> None:
    ranks = Ranks(slots_G=np.array([3, 1, 2]), node_G=np.array([0, 0, 1]), speed_G=np.ones(3))
    rng = np.random.default_rng(3)
    problem = ChainProblem(
        flow_TEE=rng.random((4, 6, 6)),
        load_LE=rng.random((5, 6)),
        ranks=ranks,
        cost_GG=rng.random((3, 3)),
    )
    assert not check.violations(problem, present(solve(problem, time_limit_s=10.0).solution))


def test_latent_clusters_are_found_and_numbered_along_the_chain() -> None:
    ranks = Ranks.uniform(ranks=8, slots_per_rank=8)
    flow_TEE = latent_clusters(
        np.random.default_rng(1), num_layers=7, num_experts=64, ranks=ranks
    ).flow_TEE
    rank_LE = clusters_along_chain(flow_TEE, num_ranks=8)
    assert all((np.bincount(row_E) == 8).all() for row_E in rank_LE)
    stays = sum(
        flow_EE[here_E[:, None] == there_E].sum()
        for flow_EE, here_E, there_E in zip(flow_TEE, rank_LE[:-1], rank_LE[1:], strict=True)
    )
    assert stays > 0.45 * flow_TEE.sum()


def test_tighter_limits_never_help() -> None:
    problem = clusters()
    tight = dataclasses.replace(problem, most_load_L=1.1 * problem.load_LE.sum(axis=1) / 4)
    free, limited = (solve(one, time_limit_s=60.0) for one in (problem, tight))
    assert not check.violations(tight, present(limited.solution))
    cost = check.objective(tight, present(limited.solution))
    assert check.objective(problem, present(free.solution)) <= 1.01 * cost
    assert 0.0 < limited.bound <= cost


def test_no_time_still_gives_a_placement_within_limits(chain: ChainProblem) -> None:
    assert not check.violations(chain, present(solve(chain, time_limit_s=1e-6).solution))


def test_one_rank_leaves_nothing_to_search() -> None:
    problem = ChainProblem(
        flow_TEE=np.ones((2, 3, 3)),
        load_LE=np.ones((3, 3)),
        ranks=Ranks.uniform(ranks=1, slots_per_rank=3),
        cost_GG=np.array([[0.7]]),
    )
    claim = solve(problem, time_limit_s=10.0)
    assert check.objective(problem, present(claim.solution)) == pytest.approx(claim.bound)


def test_no_flow_costs_nothing(chain: ChainProblem) -> None:
    idle = dataclasses.replace(chain, flow_TEE=np.zeros_like(chain.flow_TEE))
    claim = solve(idle, time_limit_s=10.0)
    assert claim.status is Status.FEASIBLE
    assert claim.bound == 0.0


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
    assert bound <= brute_force.solve(problem, time_limit_s=5.0).bound == 10.0


def test_total_costs_of_different_links_are_bounded_by_the_least_of_each_kind() -> None:
    problem = small(3, Measure.MOST_LOADED_PAIR)
    total = dataclasses.replace(problem, measure=Measure.TOTAL)
    # 0.5 more in one direction: no three costs, but least ones of 1 and 6.
    least_GG = np.where(problem.cost_GG == 0.0, 0.0, np.floor(problem.cost_GG))
    three = dataclasses.replace(total, cost_GG=least_GG)
    assert lower_bound(total, time_limit_s=60.0) == lower_bound(three, time_limit_s=60.0) > 0.0


def test_layers_above_their_limit_are_named_where_time_is_up() -> None:
    problem = small(3, Measure.TOTAL)
    rank_LE = present(fit(problem.load_LE, problem.ranks, problem.most_load_L))
    # Layer 0 is within its limit, layer 1 has its largest experts together.
    rank_LE[1, np.argsort(-problem.load_LE[1])] = np.arange(12) // 3
    before_LE = rank_LE.copy()
    fits_L = settle(problem.load_LE, rank_LE, problem.limit_L, deadline_s=-math.inf)
    assert fits_L.tolist() == [True, False, True, True]
    assert (rank_LE == before_LE).all()
