"""Placements on recorded passes, worked by hand."""

import numpy as np
import pytest

from solvers.placement.balance.eplb import eplb
from solvers.placement.ranks import Placement, Ranks
from tuner.search.place.evaluation import active_PLG, evaluate
from tuner.search.place.verdict import gain_noise

RANKS = Ranks.uniform(ranks=2, slots_per_rank=2)
IN_ORDER = Placement(expert_LS=np.array([[0, 1, 2, 3]]))


def test_the_most_loaded_rank_of_every_pass_counts() -> None:
    # Pass 0: ranks 6 and 2, mean 4. Pass 1: ranks 4 and 4.
    load_PLE = np.array([[[4.0, 2.0, 1.0, 1.0]], [[2.0, 2.0, 2.0, 2.0]]])
    evaluation = evaluate(IN_ORDER, load_PLE=load_PLE, ranks=RANKS, dispatch="even")
    assert evaluation.imbalance_P.tolist() == [1.5, 1.0]
    assert evaluation.imbalance == 1.25
    assert evaluation.worst_ratio == 1.25
    assert evaluation.mean_ratio_LG(RANKS).tolist() == [[1.25, 0.75]]


def test_a_faster_rank_may_carry_more() -> None:
    ranks = Ranks(slots_G=np.array([2, 2]), node_G=np.array([0, 0]), speed_G=np.array([3.0, 1.0]))
    load_PLE = np.array([[[4.0, 2.0, 1.0, 1.0]]])
    # Times 2 and 2 where the mean is 8 / 4.
    assert evaluate(IN_ORDER, load_PLE=load_PLE, ranks=ranks, dispatch="even").imbalance == 1.0


def test_replicas_share_their_experts_tokens() -> None:
    ranks = Ranks.uniform(ranks=2, slots_per_rank=3)
    placement = Placement(expert_LS=np.array([[0, 1, 2, 0, 3, 1]]))
    load_PLE = np.array([[[8.0, 2.0, 1.0, 1.0]]])
    evaluation = evaluate(placement, load_PLE=load_PLE, ranks=ranks, dispatch="even")
    # Rank 0: 4 + 1 + 1, rank 1: 4 + 1 + 1.
    assert evaluation.copies_PLG[0, 0].tolist() == [6.0, 6.0]


def test_layers_add_up_before_they_are_compared() -> None:
    placement = Placement(expert_LS=np.array([[0, 1, 2, 3], [0, 1, 2, 3]]))
    load_PLE = np.array([[[3.0, 3.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]])
    # Largest 6 and 4, means 4 and 4.
    evaluation = evaluate(placement, load_PLE=load_PLE, ranks=RANKS, dispatch="even")
    assert evaluation.imbalance == pytest.approx(10.0 / 8.0)
    assert evaluation.spread.p50 == pytest.approx(1.25)


def test_an_expert_with_many_tokens_is_active_and_one_with_few_is_so_at_times() -> None:
    load_PLE = np.array([[[100.0, 0.0, 1.0, 0.0]]])
    active = active_PLG(IN_ORDER, load_PLE=load_PLE, ranks=RANKS)
    assert active[0, 0] == pytest.approx([1.0, 1.0 - np.exp(-1.0)])


def test_of_a_recorded_pass_it_is_known_which_experts_were_reached() -> None:
    ranks = Ranks.uniform(ranks=2, slots_per_rank=3)
    placement = Placement(expert_LS=np.array([[0, 1, 2, 0, 3, 1]]))
    load_PLE = np.array([[[1.0, 3.0, 1.0, 0.0]]])
    active = active_PLG(placement, load_PLE=load_PLE, ranks=ranks, is_counted=True)
    # One token on one of two replicas, three on one of two, and expert 2 or 3 alone.
    assert active[0, 0] == pytest.approx([0.5 + 0.875 + 1.0, 0.5 + 0.0 + 0.875])


def test_a_layer_without_tokens_keeps_nobody_waiting() -> None:
    load_PLE = np.array([[[4.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]])
    placement = Placement(expert_LS=np.tile(np.arange(4), (2, 1)))
    evaluation = evaluate(placement, load_PLE=load_PLE, ranks=RANKS, dispatch="even")
    assert evaluation.ratio_PL.tolist() == [[1.5, 1.0]]
    assert evaluation.imbalance == 1.5


def test_one_pass_is_evaluated_over_as_many_launches_as_many_passes_are() -> None:
    load_PLE = np.random.default_rng(6).gamma(0.6, 1000.0, size=(1, 2, 32))
    ranks = Ranks.uniform(ranks=16, slots_per_rank=3, ranks_per_node=4)
    placement = eplb(load_PLE[0], ranks=ranks)
    in_order = Placement(expert_LS=np.tile(np.arange(48) % 32, (2, 1)))
    noise = {}
    for passes in (1, 3, 10):
        before, after = (
            evaluate(
                each, load_PLE=np.repeat(load_PLE, passes, axis=0), ranks=ranks, dispatch="static"
            )
            for each in (in_order, placement)
        )
        assert before.num_launches == 10
        noise[passes] = gain_noise(
            before.imbalance_P, after.imbalance_P, counted=1e12, launches=before.num_launches
        )
    assert noise[1] == pytest.approx(noise[10])
    assert 0.5 < noise[3] / noise[10] < 2.0
    assert noise[1] > 0.005
