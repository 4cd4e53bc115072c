"""Every registered method meets the oracle, on the same instances."""

import functools
from collections import Counter

import numpy as np
import pytest

from solvers.errors import RejectedClaimError, UnknownSolverError
from solvers.rank_placement.bound import lower_bound_s
from solvers.rank_placement.check import objective
from solvers.rank_placement.problem import RankPlacement, RankPlacementProblem
from solvers.registry import RANK_PLACEMENT
from solvers.result import Claim, Outcome, Status
from tests.solvers.rank_placement import brute_force
from tests.solvers.rank_placement.testing import racks, tiny_problem

SEEDS = range(40)
SEEDS_OF = {"milp": range(16)}
TIME_LIMIT_S = 60.0


@functools.cache
def instance(seed: int) -> RankPlacementProblem:
    return tiny_problem(np.random.default_rng(seed))


@functools.cache
def expected(seed: int) -> Outcome[RankPlacement]:
    problem = instance(seed)
    claim = brute_force.solve(problem, time_limit_s=TIME_LIMIT_S)
    return RANK_PLACEMENT.checked(problem, claim, method="brute_force", solve_s=0.0)


CASES = [
    (method, seed) for method in RANK_PLACEMENT.methods for seed in SEEDS_OF.get(method, SEEDS)
]


@pytest.mark.parametrize(("method", "seed"), CASES)
def test_meets_the_oracle(method: str, seed: int) -> None:
    outcome = RANK_PLACEMENT.solve(instance(seed), method=method, time_limit_s=TIME_LIMIT_S)
    assert (outcome.solution is None) == (expected(seed).solution is None)
    assert outcome.status in (expected(seed).status, Status.FEASIBLE)
    assert outcome.bound <= expected(seed).objective * (1 + 1e-9)
    # Few nodes leave annealing no room to miss the best; the next test says what it misses of many.
    assert outcome.objective == pytest.approx(expected(seed).objective, rel=1e-9)


@pytest.mark.parametrize("seed", SEEDS_OF["milp"])
def test_the_integer_program_proves_its_optimum(seed: int) -> None:
    outcome = RANK_PLACEMENT.solve(instance(seed), method="milp", time_limit_s=TIME_LIMIT_S)
    assert outcome.status is expected(seed).status


@pytest.mark.parametrize("seed", range(200))
def test_the_bound_never_passes_the_optimum(seed: int) -> None:
    problem = instance(seed)
    placement = next(brute_force.placements(problem))
    assert lower_bound_s(problem) <= objective(problem, placement) * (1 + 1e-12)
    if seed in SEEDS and expected(seed).solution is not None:
        assert lower_bound_s(problem) <= expected(seed).objective * (1 + 1e-12)


def test_the_instances_cover_every_feature() -> None:
    seen = Counter[str]()
    for seed in SEEDS:
        problem = instance(seed)
        seen[str(expected(seed).status)] += 1
        seen["several pipelines"] += problem.pipelines > 1
        seen["several stages"] += problem.stages > 1
        seen["both"] += problem.pipelines > 1 < problem.stages
        seen["a spare node"] += problem.num_nodes > problem.num_cells
        exchanges = problem.block > 1 and bool(problem.exchanged_S.any())
        seen["blocks that exchange"] += exchanges
        seen["several blocks that do"] += exchanges and problem.block < problem.pipelines
        seen["one way slower"] += bool((problem.bytes_per_s_NN != problem.bytes_per_s_NN.T).any())
    assert min(seen.values()) >= 3, seen
    assert len(seen) == 9, seen


def test_racks_are_found_again_among_shuffled_nodes() -> None:
    problem = racks(np.random.default_rng(1), num_racks=4, nodes_per_rack=4, pipelines=4)
    as_numbered = RankPlacement(node_RS=tuple(tuple(range(4 * r, 4 * r + 4)) for r in range(4)))
    outcome = RANK_PLACEMENT.solve(problem, time_limit_s=TIME_LIMIT_S)
    assert outcome.objective < 0.7 * objective(problem, as_numbered)
    assert outcome.gap_ratio < 0.1


def test_equal_nodes_and_links_need_no_search() -> None:
    problem = RankPlacementProblem(
        pipelines=4,
        stages=4,
        num_microbatches=16,
        bytes_per_s_NN=np.full((16, 16), 5e10),
        stage_s_N=np.full(16, 0.05),
        hop_bytes=1e8,
        gradient_bytes_S=np.full(4, 4e9),
        stage_bytes_S=np.ones(4, dtype=np.int64),
        memory_limit_bytes_N=np.ones(16, dtype=np.int64),
    )
    assert RANK_PLACEMENT.solve(problem, time_limit_s=TIME_LIMIT_S).status is Status.OPTIMAL


def test_slow_nodes_are_left_as_spares() -> None:
    problem = RankPlacementProblem(
        pipelines=2,
        stages=2,
        num_microbatches=8,
        bytes_per_s_NN=np.full((6, 6), 5e10),
        stage_s_N=np.array([0.05, 0.09, 0.05, 0.05, 0.08, 0.05]),
        hop_bytes=1e6,
        gradient_bytes_S=np.full(2, 1e9),
        stage_bytes_S=np.ones(2, dtype=np.int64),
        memory_limit_bytes_N=np.ones(6, dtype=np.int64),
    )
    outcome = RANK_PLACEMENT.solve(problem, time_limit_s=TIME_LIMIT_S)
    assert outcome.solution is not None
    assert sorted(outcome.solution.launch_order) == [0, 2, 3, 5]
    assert outcome.status is Status.OPTIMAL


def test_a_slow_link_lies_between_blocks_that_do_not_exchange() -> None:
    rates_NN = np.full((4, 4), 5e10)
    rates_NN[0, 1] = rates_NN[1, 0] = 5e9
    problem = RankPlacementProblem(
        pipelines=4,
        stages=1,
        num_microbatches=8,
        bytes_per_s_NN=rates_NN,
        stage_s_N=np.zeros(4),
        hop_bytes=0.0,
        gradient_bytes_S=np.ones(1),
        stage_bytes_S=np.ones(1, dtype=np.int64),
        memory_limit_bytes_N=np.ones(4, dtype=np.int64),
        block=2,
        exchange_bytes_S=np.full(1, 1e9),
    )
    outcome = RANK_PLACEMENT.solve(problem, time_limit_s=TIME_LIMIT_S)
    assert outcome.solution is not None
    order = outcome.solution.launch_order
    assert {0, 1} not in ({*order[:2]}, {*order[2:]})
    # Eight micro-batches of 1 GB to one other node at 50 GB/s, gradients of a byte apart.
    assert outcome.objective == pytest.approx(8 * 0.02, rel=1e-6)


def test_equal_inputs_give_equal_placements() -> None:
    problem = racks(np.random.default_rng(3), num_racks=2, nodes_per_rack=4, pipelines=2)
    first, second = (RANK_PLACEMENT.solve(problem, time_limit_s=TIME_LIMIT_S) for _ in range(2))
    assert first.solution == second.solution


def test_false_claims_are_refused() -> None:
    problem = racks(np.random.default_rng(3), num_racks=2, nodes_per_rack=2, pipelines=2)
    twice = RankPlacement(node_RS=((0, 1), (1, 2)))
    once = RankPlacement(node_RS=((0, 1), (3, 2)))
    for solution, bound, complaint in (
        (twice, 0.0, "lie claims a solution that is not allowed: node 1 runs 2 stages"),
        (once, 1e9, "lie claims that nothing is below"),
    ):
        claim = Claim(status=Status.FEASIBLE, solution=solution, bound=bound)
        with pytest.raises(RejectedClaimError, match=complaint):
            RANK_PLACEMENT.checked(problem, claim, method="lie", solve_s=0.0)
    with pytest.raises(UnknownSolverError, match="rank placement method 'guess' is not one of"):
        RANK_PLACEMENT.solve(problem, method="guess", time_limit_s=1.0)
