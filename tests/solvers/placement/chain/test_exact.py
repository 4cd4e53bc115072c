"""The dynamic program over company agrees with that over whole placements, and knows its limits."""

import dataclasses

import numpy as np
import pytest

from solvers.placement.chain.check import objective
from solvers.placement.chain.co_location import enumerate_states, num_states
from solvers.placement.chain.exact import _by_placement, solve
from solvers.placement.chain.hierarchy import Hierarchy, hierarchy_of
from solvers.placement.chain.problem import ChainProblem
from solvers.placement.ranks import Ranks
from solvers.result import Status
from tests.solvers.placement.chain.testing import latent_clusters


def chain(ranks: int, slots: int, per_node: int, *, layers: int = 4, seed: int = 0) -> ChainProblem:
    return latent_clusters(
        np.random.default_rng(seed),
        num_layers=layers,
        num_experts=ranks * slots,
        ranks=Ranks.uniform(ranks=ranks, slots_per_rank=slots, ranks_per_node=per_node),
    )


@pytest.mark.parametrize(
    ("ranks", "slots", "per_node", "states"),
    [(4, 1, 4, 1), (4, 1, 2, 3), (6, 1, 3, 10), (6, 1, 2, 15), (4, 2, 2, 315), (2, 3, 2, 10)],
)
def test_co_location_states_are_enough(ranks: int, slots: int, per_node: int, states: int) -> None:
    problem = chain(ranks, slots, per_node)
    shape = hierarchy_of(problem)
    assert shape is not None
    assert num_states(shape) == pytest.approx(states)
    assert len(enumerate_states(shape).block_XN) == states
    loads_L = problem.load_LE.sum(axis=1) / ranks
    problem = dataclasses.replace(problem, most_load_L=1.6 * loads_L)
    claim = solve(problem, time_limit_s=60.0)
    expected = _by_placement(problem, deadline_s=np.inf)
    assert claim.status is expected.status
    assert claim.bound == pytest.approx(expected.bound)
    if claim.solution is not None:
        assert objective(problem, claim.solution) == pytest.approx(claim.bound)


def test_one_expert_a_rank_on_one_node_is_solved_at_any_size() -> None:
    claim = solve(chain(32, 1, 32, layers=3), time_limit_s=60.0)
    assert claim.status is Status.OPTIMAL


def test_too_many_states_are_left_unsolved() -> None:
    assert solve(chain(8, 4, 4), time_limit_s=60.0).status is Status.UNKNOWN


def test_running_out_of_time_claims_nothing() -> None:
    claim = solve(chain(4, 2, 4), time_limit_s=1e-9)
    assert (claim.status, claim.solution, claim.bound) == (Status.UNKNOWN, None, -np.inf)


def test_limits_that_nothing_keeps_are_infeasible() -> None:
    problem = chain(4, 2, 2)
    tight = dataclasses.replace(problem, most_load_L=np.full(4, 1e-9))
    assert solve(tight, time_limit_s=60.0).status is Status.INFEASIBLE


def test_three_costs_are_recognised() -> None:
    assert hierarchy_of(chain(6, 2, 3)) == Hierarchy(
        num_nodes=2,
        ranks_per_node=3,
        slots_per_rank=2,
        same_rank=0.0,
        same_node=1.0,
        other_node=6.0,
    )


def test_one_cost_of_its_own_is_no_hierarchy() -> None:
    for place in (
        (0, 0),
        (0, 1),
        (0, 3),
    ):
        problem = chain(4, 1, 2)
        cost_GG = problem.cost_GG.copy()
        cost_GG[place] += 0.5
        assert hierarchy_of(dataclasses.replace(problem, cost_GG=cost_GG)) is None
