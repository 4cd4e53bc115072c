"""Every registered method meets the oracle, on the same instances."""

import functools
from collections import Counter

import numpy as np
import pytest

from solvers.errors import RejectedClaimError
from solvers.placement.coactivation.bound import lower_bound_L
from solvers.placement.coactivation.check import layer_costs
from solvers.placement.coactivation.problem import CoactivationProblem
from solvers.placement.ranks import Placement, Ranks, contiguous
from solvers.registry import COACTIVATION
from solvers.result import Claim, Outcome, Status
from tests.solvers.placement.coactivation import brute_force
from tests.solvers.placement.coactivation.testing import tiny_problem, with_topics

SEEDS = range(60)
TIME_LIMIT_S = 30.0


@functools.cache
def instance(seed: int) -> CoactivationProblem:
    return tiny_problem(np.random.default_rng(seed))


@functools.cache
def expected(seed: int) -> Outcome[Placement]:
    claim = brute_force.solve(instance(seed), time_limit_s=TIME_LIMIT_S)
    return COACTIVATION.checked(instance(seed), claim, method="brute_force", solve_s=0.0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", COACTIVATION.methods)
def test_never_passes_the_oracle(method: str, seed: int) -> None:
    outcome = COACTIVATION.solve(instance(seed), method=method, time_limit_s=TIME_LIMIT_S)
    assert (outcome.solution is None) == (expected(seed).solution is None)
    assert outcome.objective >= expected(seed).objective * (1 - 1e-12)
    assert outcome.bound <= expected(seed).objective * (1 + 1e-12)
    if outcome.status is Status.OPTIMAL:
        assert outcome.objective == pytest.approx(expected(seed).objective)


@pytest.mark.parametrize("method", COACTIVATION.methods)
def test_stays_near_the_oracle(method: str) -> None:
    excess = [
        COACTIVATION.solve(instance(seed), method=method, time_limit_s=TIME_LIMIT_S).objective
        - expected(seed).objective
        for seed in SEEDS
        if expected(seed).solution is not None
    ]
    total = sum(out.objective for seed in SEEDS if (out := expected(seed)).solution is not None)
    assert sum(excess) <= 0.02 * total


@pytest.mark.parametrize("seed", SEEDS)
def test_the_bound_never_passes_the_optimum_of_a_layer(seed: int) -> None:
    solution = expected(seed).solution
    if solution is not None:
        cost_L = layer_costs(instance(seed), solution)
        assert (lower_bound_L(instance(seed), time_limit_s=1.0) <= cost_L * (1 + 1e-12)).all()


def test_the_instances_cover_every_feature() -> None:
    seen = Counter[str]()
    for seed in SEEDS:
        problem = instance(seed)
        seen[str(expected(seed).status)] += 1
        seen["several layers"] += problem.num_layers > 1
        seen["limits"] += problem.most_load_L is not None
        seen["one chosen"] += problem.expert_LTK.shape[2] == 1
        seen["a busiest group counts"] += any(level.busiest_cost for level in problem.levels)
        seen["groups differ in cost"] += any(
            len(set(level.weights_J.tolist())) > 1 for level in problem.levels
        )
        seen["unequal slots"] += len(set(problem.ranks.slots_G.tolist())) > 1
    assert min(seen.values()) >= 3, seen
    assert len(seen) == 8, seen


@pytest.fixture(scope="module")
def topics() -> CoactivationProblem:
    return with_topics(
        np.random.default_rng(5),
        num_layers=2,
        num_tokens=2000,
        num_chosen=4,
        num_experts=32,
        ranks=Ranks.alike(ranks=8, slots_per_rank=4, ranks_per_node=4),
    )


@pytest.mark.parametrize("method", COACTIVATION.methods)
def test_latent_topics_are_brought_together(method: str, topics: CoactivationProblem) -> None:
    in_order = contiguous(num_layers=2, num_experts=32, num_slots=32)
    before = layer_costs(topics, in_order).sum()
    outcome = COACTIVATION.solve(topics, method=method, time_limit_s=TIME_LIMIT_S)
    assert outcome.objective < 0.85 * before
    assert 0.0 < outcome.bound <= outcome.objective


@pytest.mark.parametrize("method", COACTIVATION.methods)
def test_equal_inputs_give_equal_placements(method: str, topics: CoactivationProblem) -> None:
    one, two = (
        COACTIVATION.solve(topics, method=method, time_limit_s=TIME_LIMIT_S).solution
        for _ in range(2)
    )
    assert one is not None
    assert two is not None
    assert (one.expert_LS == two.expert_LS).all()


def test_false_claims_are_refused(topics: CoactivationProblem) -> None:
    in_order = contiguous(num_layers=2, num_experts=32, num_slots=32)
    twice = in_order.expert_LS.copy()
    twice[1, 0] = 5
    for placement, bound, complaint in (
        (Placement(expert_LS=twice), 0.0, "layer 1 holds expert 5 2 times, once is allowed"),
        (in_order, 1e9, "lie claims that nothing is below"),
    ):
        claim = Claim(status=Status.FEASIBLE, solution=placement, bound=bound)
        with pytest.raises(RejectedClaimError, match=complaint):
            COACTIVATION.checked(topics, claim, method="lie", solve_s=0.0)
