"""Copies of experts: how many are tried, where they go, what the most-loaded rank then bears."""

from dataclasses import replace

import numpy as np
import pytest

from tests.expect import present
from tuner.costs.serve.decoder import Experts
from tuner.costs.serve.expert_loads import ExpertLoads
from tuner.search.serve.expert_copies import ExpertCopies

OWN = Experts(num=256, top_k=8, ffn=2048, shared_ffn=2048)


def recorded(*, skew: float, layers: int = 3, seed: int = 0) -> ExpertLoads:
    rng = np.random.default_rng(seed)
    share_LE = rng.lognormal(0.0, skew, (layers, OWN.num)) if skew else np.ones((layers, OWN.num))
    return ExpertLoads(share_LE=share_LE / share_LE.sum(axis=1, keepdims=True), top_k=OWN.top_k)


def test_without_a_recording_ranks_that_divide_hold_no_copies() -> None:
    copies = ExpertCopies(is_launched=True)
    for ranks in (1, 2, 8, 64, 256):
        assert list(copies.solve_and_simulate(OWN, ranks=ranks, nodes=1)) == [(0, None)], ranks


def test_even_experts_of_sglangs_deployment_leave_some_rank_four_whole_ones() -> None:
    # 224 whole experts and 64 halves on 72 ranks of four: 8 ranks hold no half at least.
    ((count, loads),) = ExpertCopies(is_launched=True).solve_and_simulate(OWN, ranks=72, nodes=9)
    assert count == 32
    assert present(loads).num_slots == 288
    assert present(loads).expert_imbalance(72) == pytest.approx(72 * 4 / 256)


def test_ranks_that_do_not_divide_need_a_release_with_copies() -> None:
    assert not list(ExpertCopies().solve_and_simulate(OWN, ranks=72, nodes=9))
    # Twelve experts more on eight would be more than half as many.
    few = replace(OWN, num=8, top_k=2)
    assert not list(ExpertCopies(is_launched=True).solve_and_simulate(few, ranks=20, nodes=1))


def test_a_slot_more_a_rank_is_tried_where_it_levels_recorded_loads() -> None:
    skewed = ExpertCopies(loads=recorded(skew=0.8), is_launched=True)
    (none, plain), (more, levelled) = skewed.solve_and_simulate(OWN, ranks=32, nodes=4)
    assert (none, more) == (0, 32)
    assert present(levelled).num_slots == 288
    assert present(levelled).expert_imbalance(32) < 0.8 * present(plain).expert_imbalance(32)
    even = ExpertCopies(loads=recorded(skew=0.0), is_launched=True)
    assert [count for count, _ in even.solve_and_simulate(OWN, ranks=32, nodes=4)] == [0]
    unlaunched = ExpertCopies(loads=recorded(skew=0.8))
    assert [count for count, _ in unlaunched.solve_and_simulate(OWN, ranks=32, nodes=4)] == [0]


def test_a_named_placement_has_its_own_copies_on_its_own_ranks() -> None:
    own = recorded(skew=0.8)
    rows = np.tile(np.arange(288) % 256, (3, 1))
    named = ExpertLoads(share_LE=own.share_LE, top_k=own.top_k, expert_LS=rows, slots_R=(9,) * 32)
    copies = ExpertCopies(loads=named, is_launched=True)
    assert list(copies.solve_and_simulate(OWN, ranks=32, nodes=4)) == [(32, named)]
    assert copies.borne(OWN, ranks=32, nodes=4, redundant=0) is named
    others = dict(copies.solve_and_simulate(OWN, ranks=16, nodes=2))
    assert set(others) == {0, 16}
    assert present(others[0]).expert_LS is None
    # Other slots than the placement's are placed anew.
    assert present(copies.borne(OWN, ranks=32, nodes=4, redundant=64)).num_slots == 320


def test_groups_of_experts_stay_on_nodes_where_they_divide() -> None:
    copies = ExpertCopies(loads=recorded(skew=0.8), groups=8, is_launched=True)
    loads = present(copies.borne(OWN, ranks=32, nodes=4, redundant=32))
    for row in present(loads.expert_LS).reshape(3, 4, 72):
        for experts in row:
            assert len({int(expert) // 32 for expert in experts}) == 2
    assert copies.borne(OWN, ranks=32, nodes=4, redundant=32) is loads
    assert copies.borne(OWN, ranks=32, nodes=4, redundant=5) is None
