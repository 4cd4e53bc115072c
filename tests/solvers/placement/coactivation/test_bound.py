import dataclasses

import numpy as np
import pytest

from solvers.placement.coactivation.bound import (
    fewest_copies,
    lower_bound_L,
    most_saved,
    tokens_of_both_EE,
)
from solvers.placement.coactivation.check import layer_costs
from solvers.placement.coactivation.problem import CoactivationProblem, Level
from solvers.placement.ranks import Ranks
from solvers.registry import COACTIVATION
from tests.solvers.placement.coactivation.contract import COACTIVATION as COACTIVATION_CONTRACT
from tests.solvers.placement.coactivation.testing import with_topics


def test_savings_follow_the_most_even_split() -> None:
    # 4 experts in 3 groups: one pair, one copy saved; 2 + 2: two pairs; all in one: six pairs.
    slots_J = np.array([4, 4, 4, 4])
    saved = [most_saved(pairs, 4, slots_J) for pairs in (0.0, 1.0, 2.0, 4.0, 6.0, 9.0)]
    assert saved == pytest.approx([0.0, 1.0, 2.0, 2.5, 3.0, 3.0])


def test_a_group_too_small_for_a_token_is_not_enough() -> None:
    assert most_saved(99.0, 4, np.array([3, 3])) == pytest.approx(2.0)


def test_one_slot_a_group_saves_nothing() -> None:
    problem = CoactivationProblem(
        expert_LTK=np.array([[[0, 1], [2, 3], [0, 3]]]),
        load_LE=np.ones((1, 4)),
        ranks=Ranks.uniform(ranks=4, slots_per_rank=1),
        levels=(Level(group_G=np.arange(4), total_cost=1.0),),
    )
    both_EE = tokens_of_both_EE(problem.expert_LTK[0], 4)
    assert both_EE[0].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert fewest_copies(problem, problem.levels[0], both_EE) == 6.0


def test_separate_pairs_are_bounded_exactly() -> None:
    # Experts 0-1 and 2-3 are always chosen together: one copy each, and two tokens a group.
    problem = CoactivationProblem(
        expert_LTK=np.array([[[0, 1], [2, 3], [0, 1], [2, 3]]]),
        load_LE=np.ones((1, 4)),
        ranks=Ranks.uniform(ranks=2, slots_per_rank=2),
        levels=(Level(group_G=np.arange(2), total_cost=1.0, peak_cost=10.0),),
    )
    bound_L = lower_bound_L(problem)
    assert bound_L.tolist() == [4.0 + 10.0 * 2 * 2]
    assert COACTIVATION.solve(problem, time_limit_s=5.0).objective == bound_L[0]


def test_a_slow_group_raises_the_peak_and_the_total_bound() -> None:
    # Experts 0-1 and 2-3 may share groups, 0-2 then cannot: F = 4 copies of three tokens at least,
    # of which 3 go into the cheap group at most.
    weights_J = np.array([1.0, 10.0])
    problem = CoactivationProblem(
        expert_LTK=np.array([[[0, 1], [2, 3], [0, 2]]]),
        load_LE=np.ones((1, 4)),
        ranks=Ranks.uniform(ranks=2, slots_per_rank=2),
        levels=(Level(group_G=np.arange(2), total_cost=1.0, weight_J=weights_J),),
    )
    assert lower_bound_L(problem).tolist() == [3.0 + 10.0]
    peak_level = Level(group_G=np.arange(2), total_cost=0.0, peak_cost=1.0, weight_J=weights_J)
    other = dataclasses.replace(problem, levels=(peak_level,))
    assert lower_bound_L(other) == pytest.approx([2 * 4 / 1.1])


def test_no_layer_of_an_optimum_is_below_its_bound() -> None:
    for seed in range(COACTIVATION_CONTRACT.count):
        problem, best = COACTIVATION_CONTRACT.instance(seed), COACTIVATION_CONTRACT.best(seed)
        if best.solution is None:
            continue
        bound_L, cost_L = (
            lower_bound_L(problem),
            layer_costs(problem, best.solution),
        )
        assert not (bound_L > cost_L * (1 + 1e-12)).any(), (seed, bound_L, cost_L)


def test_the_bound_of_latent_topics_is_not_far_below_what_is_found() -> None:
    problem = with_topics(
        np.random.default_rng(1),
        num_layers=2,
        num_tokens=3000,
        num_chosen=6,
        num_experts=64,
        ranks=Ranks.uniform(ranks=8, slots_per_rank=8, ranks_per_node=4),
    )
    outcome = COACTIVATION.solve(problem, time_limit_s=30.0)
    assert 0.7 * outcome.objective < lower_bound_L(problem).sum() <= outcome.objective
