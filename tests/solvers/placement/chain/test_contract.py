"""Every registered method meets the oracle, on the same instances."""

import functools
from collections import Counter

import numpy as np
import pytest

from solvers.errors import RejectedClaimError
from solvers.placement.chain.bound import lower_bound
from solvers.placement.chain.check import objective
from solvers.placement.chain.hierarchy import hierarchy_of
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.ranks import Placement, Ranks, contiguous
from solvers.registry import CHAIN
from solvers.result import Claim, Outcome, Status
from tests.solvers.placement.chain import brute_force
from tests.solvers.placement.chain.testing import latent_clusters, tiny_problem

SEEDS = range(60)
TIME_LIMIT_S = 30.0


@functools.cache
def instance(seed: int) -> ChainProblem:
    return tiny_problem(np.random.default_rng(seed))


@functools.cache
def expected(seed: int) -> Outcome[Placement]:
    claim = brute_force.solve(instance(seed), time_limit_s=TIME_LIMIT_S)
    return CHAIN.checked(instance(seed), claim, method="brute_force", solve_s=0.0)


@functools.cache
def solved(method: str, seed: int) -> Outcome[Placement]:
    return CHAIN.solve(instance(seed), method=method, time_limit_s=TIME_LIMIT_S)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("method", CHAIN.methods)
def test_never_passes_the_oracle(method: str, seed: int) -> None:
    outcome = solved(method, seed)
    assert (outcome.solution is None) == (expected(seed).solution is None)
    assert outcome.objective >= expected(seed).objective * (1 - 1e-12)
    assert outcome.bound <= expected(seed).objective * (1 + 1e-12)
    if outcome.status in (Status.OPTIMAL, Status.INFEASIBLE):
        assert outcome.objective == pytest.approx(expected(seed).objective)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_dynamic_program_proves_what_it_finds(seed: int) -> None:
    outcome = solved("exact", seed)
    assert outcome.status is expected(seed).status
    assert outcome.objective == pytest.approx(expected(seed).objective)


def test_sweeps_stay_near_the_oracle() -> None:
    feasible = [seed for seed in SEEDS if expected(seed).solution is not None]
    total = sum(expected(seed).objective for seed in feasible)
    assert sum(solved("sweeps", seed).objective for seed in feasible) <= 1.02 * total


@pytest.mark.parametrize("seed", SEEDS)
def test_the_bound_never_passes_the_optimum(seed: int) -> None:
    bound = lower_bound(instance(seed), time_limit_s=1.0)
    assert bound <= expected(seed).objective * (1 + 1e-12)


def test_the_instances_cover_every_feature() -> None:
    seen = Counter[str]()
    for seed in SEEDS:
        problem = instance(seed)
        seen[str(expected(seed).status)] += 1
        seen["one layer"] += problem.num_layers == 1
        seen["limits"] += problem.most_load_L is not None
        seen["busiest pair"] += problem.measure is Measure.BUSIEST_PAIR
        seen["three costs"] += hierarchy_of(problem) is not None
        seen["costs of any kind"] += hierarchy_of(problem) is None
        seen["unequal slots"] += len(set(problem.ranks.slots_G.tolist())) > 1
    assert min(seen.values()) >= 3, seen
    assert len(seen) == 8, seen


@pytest.fixture(scope="module")
def clusters() -> ChainProblem:
    ranks = Ranks.alike(ranks=8, slots_per_rank=4, ranks_per_node=4)
    return latent_clusters(np.random.default_rng(5), num_layers=6, num_experts=32, ranks=ranks)


def test_false_claims_are_refused(clusters: ChainProblem) -> None:
    in_order = contiguous(num_layers=6, num_experts=32, num_slots=32)
    twice = in_order.expert_LS.copy()
    twice[1, 0] = 5
    for placement, bound, complaint in (
        (Placement(expert_LS=twice), 0.0, "layer 1 holds expert 5 2 times, once is allowed"),
        (in_order, 1e9, "lie claims that nothing is below"),
    ):
        claim = Claim(status=Status.FEASIBLE, solution=placement, bound=bound)
        with pytest.raises(RejectedClaimError, match=complaint):
            CHAIN.checked(clusters, claim, method="lie", solve_s=0.0)


def test_equal_inputs_give_equal_placements(clusters: ChainProblem) -> None:
    one, two = (
        CHAIN.solve(clusters, method="sweeps", time_limit_s=TIME_LIMIT_S).solution for _ in range(2)
    )
    assert one is not None
    assert two is not None
    assert (one.expert_LS == two.expert_LS).all()
    in_order = contiguous(num_layers=6, num_experts=32, num_slots=32)
    assert objective(clusters, one) < 0.75 * objective(clusters, in_order)
