import numpy as np
import pytest

from solvers.rank_placement import annealing
from solvers.rank_placement.bound import lower_bound_s
from solvers.rank_placement.check import objective
from solvers.rank_placement.problem import RankPlacement, RankPlacementProblem
from solvers.registry import RANK_PLACEMENT
from solvers.result import Status
from tests.expect import present
from tests.solvers.rank_placement import brute_force
from tests.solvers.rank_placement.contract import RANK_PLACEMENT as RANK_PLACEMENT_CONTRACT
from tests.solvers.rank_placement.testing import racks, tiny_problem

TIME_LIMIT_S = 60.0


def test_no_placement_beats_the_bound() -> None:
    for seed in range(200):
        problem = tiny_problem(np.random.default_rng(seed))
        placement = next(brute_force.placements(problem))
        bound_s, step_s = lower_bound_s(problem), objective(problem, placement)
        assert bound_s <= step_s * (1 + 1e-12), (seed, bound_s, step_s)


def test_racks_are_recovered_from_shuffled_nodes() -> None:
    problem = racks(np.random.default_rng(1), num_racks=4, nodes_per_rack=4, pipelines=4)
    as_numbered = RankPlacement(node_RS=tuple(tuple(range(4 * r, 4 * r + 4)) for r in range(4)))
    outcome = RANK_PLACEMENT.solve(problem, time_limit_s=TIME_LIMIT_S)
    assert outcome.objective < 0.7 * objective(problem, as_numbered)
    assert outcome.gap_ratio < 0.3


def test_annealing_misses_no_optimum_among_few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annealing, "MOST_ORDERS", 0)
    for seed in RANK_PLACEMENT_CONTRACT.first[:4]:
        best = RANK_PLACEMENT_CONTRACT.best(seed)
        problem = RANK_PLACEMENT_CONTRACT.instance(seed)
        annealed = RANK_PLACEMENT.solve(problem, time_limit_s=TIME_LIMIT_S)
        assert annealed.objective <= best.objective * (1 + 1e-9), (seed, annealed, best)
        assert annealed.bound <= best.objective, (seed, annealed, best)


def test_equal_nodes_and_links_need_no_search() -> None:
    problem = RankPlacementProblem(
        pipelines=4,
        stages=4,
        num_microbatches=16,
        bytes_per_s_NN=np.full((16, 16), 5e10),
        hop_bytes=1e8,
        gradient_bytes_S=np.full(4, 4e9),
        block=1,
        all_to_all_bytes_S=np.zeros(4),
        block_gradient_bytes_S=np.zeros(4),
    )
    assert RANK_PLACEMENT.solve(problem, time_limit_s=TIME_LIMIT_S).status is Status.OPTIMAL


def test_a_slow_link_lies_between_blocks_without_all_to_all() -> None:
    rates_NN = np.full((4, 4), 5e10)
    rates_NN[0, 1] = rates_NN[1, 0] = 5e9
    problem = RankPlacementProblem(
        pipelines=4,
        stages=1,
        num_microbatches=8,
        bytes_per_s_NN=rates_NN,
        hop_bytes=0.0,
        gradient_bytes_S=np.ones(1),
        block_gradient_bytes_S=np.zeros(1),
        block=2,
        all_to_all_bytes_S=np.full(1, 1e9),
    )
    outcome = RANK_PLACEMENT.solve(problem, time_limit_s=TIME_LIMIT_S)
    order = present(outcome.solution).launch_order
    assert {0, 1} not in ({*order[:2]}, {*order[2:]})
    # Eight micro-batches of 1 GB to one other node at 50 GB/s, gradients of a byte apart.
    assert outcome.objective == pytest.approx(8 * 0.02, rel=1e-6)
