import dataclasses

import numpy as np
import pytest

from solvers.placement.chain import check
from solvers.placement.chain.annealing import Annealer
from solvers.placement.chain.clusters import clusters_along_chain
from solvers.placement.chain.flows import Flows
from solvers.placement.chain.problem import ChainProblem
from solvers.placement.chain.sweeps import solve
from solvers.placement.ranks import Ints, Ranks
from solvers.placement.single import placed
from solvers.placement.start_placement import fit
from solvers.result import Status
from tests.solvers.placement.chain.contract import clusters
from tests.solvers.placement.chain.testing import latent_clusters


@pytest.fixture(scope="module")
def chain() -> ChainProblem:
    ranks = Ranks.uniform(ranks=8, slots_per_rank=4, ranks_per_node=4)
    problem = latent_clusters(np.random.default_rng(1), num_layers=7, num_experts=32, ranks=ranks)
    return dataclasses.replace(problem, most_load_L=1.1 * problem.load_LE.sum(axis=1) / 8)


def test_prices_are_the_cost_of_moving_one_layer(chain: ChainProblem) -> None:
    rank_LE = fit(chain.load_LE, chain.ranks, None).rank_LE
    flows = Flows.of(chain)
    price_AEG = flows.prices_AEG(np.array([0, 3, 6]), rank_LE)
    before = check.objective(chain, placed(rank_LE))
    for price_EG, layer in zip(price_AEG, (0, 3, 6), strict=True):
        one, two = np.flatnonzero(rank_LE[layer] != rank_LE[layer, 0])[0], 0
        swapped_LE = rank_LE.copy()
        swapped_LE[layer, [one, two]] = rank_LE[layer, [two, one]]
        here, there = rank_LE[layer, [one, two]]
        change = price_EG[one, there] - price_EG[one, here]
        change += price_EG[two, here] - price_EG[two, there]
        after = check.objective(chain, placed(swapped_LE))
        assert flows.unit * float(change) == pytest.approx(after - before, rel=1e-3)


def turned(chain: ChainProblem, rank_LE: Ints, *, temperature: float, over: float) -> Ints:
    annealer = Annealer(
        Flows.of(chain), chain.load_LE, chain.ranks, chain.most_load_L, np.random.default_rng(2)
    )
    rank_LE = rank_LE.copy()
    for turn in range(60):
        annealer.turn(rank_LE, turn % 2, temperature=temperature, over=over, steps=7)
    return rank_LE


def test_a_strict_cold_turn_only_improves_and_keeps_limits(chain: ChainProblem) -> None:
    start_LE = fit(chain.load_LE, chain.ranks, chain.most_load_L).rank_LE
    cold_LE = turned(chain, start_LE, temperature=1e-6, over=np.inf)
    assert not check.violations(chain, placed(cold_LE))
    before, after = (check.objective(chain, placed(rows)) for rows in (start_LE, cold_LE))
    assert after < 0.9 * before


def test_unequal_slots_stay_as_they_are() -> None:
    ranks = Ranks(slots_G=np.array([3, 1, 2]), node_G=np.array([0, 0, 1]), speed_G=np.ones(3))
    rng = np.random.default_rng(3)
    problem = ChainProblem(
        flow_TEE=rng.random((4, 6, 6)),
        load_LE=rng.random((5, 6)),
        ranks=ranks,
        cost_GG=rng.random((3, 3)),
    )
    start_LE = fit(problem.load_LE, ranks, None).rank_LE
    hot_LE = turned(problem, start_LE, temperature=10.0, over=1.0)
    assert (hot_LE != start_LE).any()
    assert all((np.bincount(row_E) == [3, 1, 2]).all() for row_E in hot_LE)


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
    assert free.solution is not None
    assert limited.solution is not None
    assert not check.violations(tight, limited.solution)
    cost = check.objective(tight, limited.solution)
    assert check.objective(problem, free.solution) <= 1.01 * cost
    assert 0.0 < limited.bound <= cost


def test_no_time_still_gives_a_placement_within_limits(chain: ChainProblem) -> None:
    claim = solve(chain, time_limit_s=1e-6)
    assert claim.solution is not None
    assert not check.violations(chain, claim.solution)


def test_one_rank_leaves_nothing_to_search() -> None:
    problem = ChainProblem(
        flow_TEE=np.ones((2, 3, 3)),
        load_LE=np.ones((3, 3)),
        ranks=Ranks.uniform(ranks=1, slots_per_rank=3),
        cost_GG=np.array([[0.7]]),
    )
    claim = solve(problem, time_limit_s=10.0)
    assert claim.solution is not None
    assert check.objective(problem, claim.solution) == pytest.approx(claim.bound)


def test_no_flow_costs_nothing(chain: ChainProblem) -> None:
    idle = dataclasses.replace(chain, flow_TEE=np.zeros_like(chain.flow_TEE))
    claim = solve(idle, time_limit_s=10.0)
    assert claim.status is Status.FEASIBLE
    assert claim.bound == 0.0
