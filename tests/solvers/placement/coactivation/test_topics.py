from collections.abc import Callable

import pytest

from solvers.placement.coactivation import local_search
from solvers.placement.coactivation.check import layer_costs
from solvers.placement.ranks import Placement, contiguous, placed
from solvers.registry import COACTIVATION
from solvers.result import Claim
from tests.expect import present
from tests.solvers.contract import are_equal
from tests.solvers.placement.coactivation.contract import topics

Solve = Callable[..., Claim[Placement]]


@pytest.mark.parametrize("method", COACTIVATION.methods)
def test_latent_topics_are_co_located_reproducibly(method: str) -> None:
    problem = topics()
    in_order = contiguous(num_layers=2, num_experts=32, num_slots=32)
    one, two = (COACTIVATION.solve(problem, method=method, time_limit_s=30.0) for _ in range(2))
    assert one.objective < 0.85 * layer_costs(problem, in_order).sum()
    assert 0.0 < one.bound <= one.objective
    assert are_equal(one.solution, two.solution)


@pytest.mark.parametrize("solve", [local_search.solve, local_search.swaps])
def test_bound_tables_and_groups_count_against_the_time_limit(solve: Solve) -> None:
    problem = topics()
    claim = solve(problem, time_limit_s=0.0)
    assert are_equal(claim.solution, placed(present(local_search.starting_ranks(problem))))
    assert claim.bound == 0.0
