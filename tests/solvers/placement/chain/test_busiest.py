import dataclasses
import math

import numpy as np
import pytest

from solvers.placement.chain import check
from solvers.placement.chain.busiest import changes_EE, descend
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.chain.testing import latent_clusters
from solvers.placement.fitting import fit
from solvers.placement.ranks import Ranks
from solvers.placement.single import placed


def chain(seed: int) -> ChainProblem:
    problem = latent_clusters(
        np.random.default_rng(seed),
        num_layers=4,
        num_experts=12,
        ranks=Ranks.alike(ranks=4, slots_per_rank=3, ranks_per_node=2),
    )
    cost_GG = problem.cost_GG + np.triu(np.full((4, 4), 0.5), k=1)
    limit_L = 1.2 * problem.load_LE.sum(axis=1) / 4
    return dataclasses.replace(
        problem, cost_GG=cost_GG, most_load_L=limit_L, measure=Measure.BUSIEST_PAIR
    )


@pytest.mark.parametrize("layer", range(4))
def test_every_swap_is_foretold(layer: int) -> None:
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
