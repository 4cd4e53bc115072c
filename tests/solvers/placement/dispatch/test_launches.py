from dataclasses import replace

import numpy as np

from solvers.placement.dispatch.case import split_loads
from solvers.placement.dispatch.launches import launched_shares, nearest_H, splits, targets
from solvers.placement.dispatch.nearest import dealt_variance, near_shares, spread_variance
from solvers.placement.ranks import Ints, Placement, Ranks
from tests.solvers.placement.dispatch import static
from tests.solvers.placement.dispatch.testing import sample_case

PAIRS = Ranks.uniform(ranks=6, slots_per_rank=1, ranks_per_node=2)


def drawn(rows: list[list[int]], ranks: Ranks, *, launches: int) -> dict[tuple[int, int], Ints]:
    """Targets by layer and expert."""
    placement = Placement(expert_LS=np.array(rows))
    actual = targets(placement, ranks=ranks, rng=np.random.default_rng(0), launches=launches)
    return {
        (layer, rows[layer][slot_R[0]]): ranks.rank_S[slot_R][replica_DH]
        for layer, slot_R, replica_DH in actual
    }


def test_ranks_with_the_same_deals_behind_them_are_dealt_evenly_together() -> None:
    # Expert 0 on ranks 0 and 2 of nodes {0, 1}, {2, 3}, {4, 5}: ranks 4 and 5 get one each.
    target = drawn([[0, 1, 0, 2, 3, 4]] * 2, PAIRS, launches=50)
    for layer in range(2):
        assert (target[layer, 0][:, :4] == [0, 0, 2, 2]).all()
        assert set(map(tuple, target[layer, 0][:, 4:].tolist())) == {(0, 2), (2, 0)}


def test_streams_that_diverge_coincide_after_as_many_equal_deals() -> None:
    # One node of four ranks. Experts 0 to 2 on pairs of them: ranks 2 and 3 draw for expert 0,
    # 0 and 1 for expert 1, and 0 and 2, one deal of two by two behind each, share the third.
    ranks = Ranks.uniform(ranks=4, slots_per_rank=2)
    target = drawn([[0, 3, 0, 2, 1, 4, 1, 2]], ranks, launches=100)
    assert set(map(tuple, target[0, 2][:, [0, 2]].tolist())) == {(1, 3), (3, 1)}


def test_streams_with_other_deals_behind_them_are_independent() -> None:
    # Experts 0 on two and 1 on three of four ranks: rank 3 draws twice, ranks 1 and 2 once.
    ranks = Ranks.uniform(ranks=4, slots_per_rank=3)
    target = drawn([[0, 1, 3, 0, 1, 2, 4, 1, 2, 5, 6, 7]], ranks, launches=200)
    assert set(map(tuple, target[0, 2][:, [0, 3]].tolist())) == {(1, 1), (1, 2), (2, 1), (2, 2)}


def test_launches_scatter_as_other_seeds_of_the_engine_s_numbers_do() -> None:
    ranks = Ranks.uniform(ranks=16, slots_per_rank=5, ranks_per_node=4)
    case = sample_case(passes=1, layers=3, experts=64, ranks=ranks, seed=7)
    ours_DLG = [split_loads(case, share_LS)[0] for share_LS in splits(case, launches=300)]
    theirs_DLG = [static.rank_loads(replace(case, seed=seed))[0] for seed in range(300)]
    ours_LG, theirs_LG = (np.std(load_DLG, axis=0) for load_DLG in (ours_DLG, theirs_DLG))
    # The engine's streams also meet where other deals used up as many numbers: 4 % less here.
    assert 0.97 < ours_LG.mean() / theirs_LG.mean() < 1.08
    assert np.abs(ours_LG - theirs_LG).max() < 0.25 * theirs_LG.max()


def test_shares_and_scatter_are_those_of_many_launches() -> None:
    for num_ranks, slots, per_node, experts in (
        (8, 3, 2, 16),
        (12, 3, 4, 20),
        (8, 9, 8, 64),
        (6, 4, 6, 18),
    ):
        ranks = Ranks.uniform(ranks=num_ranks, slots_per_rank=slots, ranks_per_node=per_node)
        row_S = _spread_row(ranks, experts)
        # Streams part in the first layers.
        placement = Placement(expert_LS=np.array([row_S] * 3))
        drawn_DS = launched_shares(placement, ranks, seed=1, launches=4000)[:, 2]
        shares = near_shares(placement.expert_LS, ranks=ranks, num_experts=experts)
        for slot in np.flatnonzero(np.bincount(row_S)[row_S] > 1):
            mean, spread = drawn_DS[:, slot].mean(), drawn_DS[:, slot].std()
            guess = np.sqrt(shares.variance_LS[2, slot])
            # Ranks with the same deals behind them scatter less than independent ones
            is_like = -0.06 < spread - guess < 0.012
            assert abs(mean - shares.mean_LS[2, slot]) <= 0.01, (
                num_ranks,
                slot,
                mean,
                spread,
                guess,
            )
            assert is_like, (
                num_ranks,
                slot,
                mean,
                spread,
                guess,
            )


def test_a_replica_on_every_node_leaves_nothing_to_chance() -> None:
    ranks = Ranks.uniform(ranks=8, slots_per_rank=2, ranks_per_node=4)
    # Expert 0 on both nodes, expert 1 on two ranks of the first.
    row_S = np.array([[0, 1, 1, 2, 3, 4, 5, 6, 0, 7, 8, 9, 10, 11, 12, 13]])
    shares = near_shares(row_S, ranks=ranks, num_experts=14)
    assert shares.mean_LS[0, [0, 8]].tolist() == [0.5, 0.5]
    assert shares.variance_LS[0, [0, 8]].tolist() == [0.0, 0.0]
    assert shares.mean_LS[0, [1, 2]].tolist() == [0.5, 0.5]
    assert (shares.variance_LS[0, [1, 2]] > 0.0).all()
    assert spread_variance(np.array([1, 2, 3]), ranks=ranks).tolist() == [0.0, 0.0, 0.0]


def test_dealt_places_are_hypergeometric() -> None:
    # 8 of 16 places, 8 of each of two replicas: 8 * 1/4 * 8/15. All 8 of 8: none is left to chance.
    actual = dealt_variance(np.array([8.0, 8.0]), np.array([16.0, 8.0]), np.array([2.0, 2.0]))
    np.testing.assert_allclose(actual, [16.0 / 15.0, 0.0])


def test_expected_shares_are_those_of_the_rule() -> None:
    # By the definition of what is near, replica by replica.
    ranks = Ranks.uniform(ranks=12, slots_per_rank=7, ranks_per_node=4)
    case = sample_case(passes=1, layers=3, experts=64, ranks=ranks, seed=3)
    shares = near_shares(case.placement.expert_LS, ranks=ranks, num_experts=64)
    for layer, expert in np.ndindex(3, 64):
        slots = np.flatnonzero(case.placement.expert_LS[layer] == expert)
        near_H = nearest_H(ranks.rank_S[slots], ranks=ranks)
        near_R = (near_H[:, None] == np.arange(len(slots))).mean(axis=0)
        np.testing.assert_allclose(shares.near_LS[layer, slots], near_R, atol=1e-12)
        far = (near_H < 0).mean()
        np.testing.assert_allclose(shares.far_LS[layer, slots], far, atol=1e-12)
        mean_R = near_R + far / len(slots)
        np.testing.assert_allclose(shares.mean_LS[layer, slots], mean_R, atol=1e-12)


def _spread_row(ranks: Ranks, experts: int) -> Ints:
    """Experts in order, then copies of the first ones where they do not stand yet."""
    row_S = np.full(ranks.num_slots, -1)
    row_S[np.random.default_rng(0).permutation(ranks.num_slots)[:experts]] = np.arange(experts)
    for expert, slot in enumerate(np.flatnonzero(row_S < 0)):
        held_E = row_S[ranks.rank_S == ranks.rank_S[slot]]
        row_S[slot] = next(e for e in range(expert % 4, experts) if e not in held_E)
    return row_S
