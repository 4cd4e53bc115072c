"""A chain in which half of the flow stays in latent clusters."""

from solvers.placement.chain.check import objective
from solvers.placement.ranks import contiguous
from solvers.registry import CHAIN
from tests.solvers.contract import are_equal
from tests.solvers.placement.chain.contract import clusters


def test_clusters_are_found_reproducibly() -> None:
    problem = clusters()
    one, two = (
        CHAIN.solve(problem, method="local_search", time_limit_s=30.0).solution for _ in range(2)
    )
    assert one is not None
    assert are_equal(one, two)
    in_order = contiguous(num_layers=4, num_experts=16, num_slots=16)
    assert objective(problem, one) < 0.75 * objective(problem, in_order)
