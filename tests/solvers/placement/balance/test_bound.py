import dataclasses
import functools

import numpy as np
import pytest

from solvers.placement.balance import check
from solvers.placement.balance.bound import bound, layer_bounds, least_largest_shares
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.ranks import Floats, Placement, Ranks
from solvers.result import Claim
from tests.expect import present
from tests.solvers.placement.balance import brute_force
from tests.solvers.placement.balance.testing import tiny_problem


def even(load_E: list[float], *, ranks: int, slots_per_rank: int) -> BalanceProblem:
    return BalanceProblem(
        load_WLE=np.array([[load_E]]),
        weight_W=np.ones(1),
        ranks=Ranks.uniform(ranks=ranks, slots_per_rank=slots_per_rank),
    )


def test_nothing_is_below_the_mean() -> None:
    assert layer_bounds(even([1.0, 2.0, 3.0, 2.0], ranks=2, slots_per_rank=2)) == 4.0


def test_a_hot_expert_has_only_so_many_copies() -> None:
    # 4 slots for 3 experts: the hot one in two copies carries 10 in each; the mean is 6.
    assert layer_bounds(even([20.0, 2.0, 2.0], ranks=4, slots_per_rank=1)) == 10.0


def test_the_largest_share_is_the_least_that_the_slots_allow() -> None:
    load_E = np.array([7.0, 3.0, 2.0, 1.0, 0.5])
    shares = sorted({load / copies for load in load_E for copies in range(1, 13)})
    for num_slots in (5, 6, 7, 9, 12):
        least = min(x for x in shares if np.ceil(load_E / x - 1e-12).sum() <= num_slots)
        actual = least_largest_shares(load_E[None], num_slots=num_slots)[0]
        assert actual == pytest.approx(least, rel=1e-12), num_slots


@functools.cache
def solved(seed: int) -> tuple[BalanceProblem, Claim[Placement]]:
    problem = tiny_problem(np.random.default_rng(seed), with_migration=False)
    return problem, brute_force.solve(problem, time_limit_s=60.0)


def test_no_placement_and_no_layer_of_one_beats_the_bound() -> None:
    for seed in range(60):
        problem, claim = solved(seed)
        assert bound(problem) <= claim.bound * (1.0 + 1e-12), (seed, bound(problem), claim.bound)
        bound_WL = layer_bounds(problem)
        for (workload, layer), least in np.ndenumerate(least_times(problem)):
            assert bound_WL[workload, layer] <= least * (1.0 + 1e-12), (
                seed,
                workload,
                layer,
                float(bound_WL[workload, layer]),
                least,
            )


def least_times(problem: BalanceProblem) -> Floats:
    """The largest time of each workload and layer, placed for it alone, [W][L]."""
    least_WL = np.empty(problem.load_WLE.shape[:2])
    for workload, layer in np.ndindex(least_WL.shape):
        alone = dataclasses.replace(
            problem,
            load_WLE=problem.load_WLE[workload, layer][None, None].copy(),
            weight_W=np.ones(1),
        )
        best = present(brute_force.solve(alone, time_limit_s=60.0).solution)
        least_WL[workload, layer] = check.layer_times(alone, best)[0, 0]
    return least_WL


def test_the_bound_is_often_reached() -> None:
    gaps = [claim.bound / bound(problem) - 1.0 for problem, claim in map(solved, range(60))]
    assert np.median(gaps) < 0.35
    assert min(gaps) < 1e-9


def test_reading_weights_raises_the_bound() -> None:
    plain = even([4.0, 4.0, 1.0, 1.0], ranks=2, slots_per_rank=3)
    costly = dataclasses.replace(plain, active_load=5.0)
    # Six copies are reached almost surely or not at all; the least work has both spare copies of
    # one of the rare experts: 10 + 5 * (2 (1 - e^-4) + (1 - e^-1) + 3 (1 - e^-1/3)).
    least = 10 + 5 * (2 * (1 - np.exp(-4)) + (1 - np.exp(-1)) + 3 * (1 - np.exp(-1 / 3)))
    assert layer_bounds(costly)[0, 0] == pytest.approx(least / 2, rel=1e-9)
