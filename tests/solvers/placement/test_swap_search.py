import math

import numpy as np

from solvers.placement.ranks import Ranks
from solvers.placement.swap_search import fit, longest_first, rank_loads, settle
from tests.expect import present

TWO = Ranks.uniform(ranks=2, slots_per_rank=2)


def test_the_longest_goes_first_to_the_least_loaded_rank() -> None:
    # 8 -> rank 0, 5 -> rank 1, 4 -> rank 1, which is then full, so 1 -> rank 0.
    assert longest_first(np.array([[1.0, 8.0, 5.0, 4.0]]), TWO).tolist() == [[0, 0, 1, 1]]


def test_a_layer_within_its_limit_is_left_as_it_is() -> None:
    load_LE = np.array([[4.0, 3.0, 2.0, 1.0]])
    assert rank_loads(load_LE, present(fit(load_LE, TWO, np.array([5.0])))).tolist() == [[5.0, 5.0]]


def test_nothing_is_returned_above_a_limit() -> None:
    ranks = Ranks.uniform(ranks=4, slots_per_rank=8)
    load_LE = np.random.default_rng(0).gamma(1.0, size=(1, 32))
    assert fit(load_LE, ranks, load_LE.sum(axis=1) / 4 * 0.99) is None


def test_unequal_slots_are_kept() -> None:
    ranks = Ranks(slots_G=np.array([1, 3, 2]), node_G=np.zeros(3, dtype=int), speed_G=np.ones(3))
    rank_LE = longest_first(np.random.default_rng(1).random((5, 6)), ranks)
    assert all((np.bincount(row_E) == [1, 3, 2]).all() for row_E in rank_LE)


def test_repairing_meets_a_limit_that_longest_first_misses() -> None:
    load_LE = np.random.default_rng(2).gamma(2.0, size=(6, 64))
    ranks = Ranks.uniform(ranks=8, slots_per_rank=8)
    rank_LE = longest_first(load_LE, ranks)
    largest_L = rank_loads(load_LE, rank_LE).max(axis=1)
    mean_L = load_LE.sum(axis=1) / 8
    limit_L = mean_L + 0.3 * (largest_L - mean_L)
    assert fit(load_LE, ranks, limit_L) is not None
    assert settle(load_LE, rank_LE, limit_L).all()
    assert all((np.bincount(row_E) == 8).all() for row_E in rank_LE)
    assert (rank_loads(load_LE, rank_LE).max(axis=1) <= limit_L * (1.0 + 1e-9)).all()


def test_repairing_takes_the_best_swap_of_all_until_the_deadline() -> None:
    # Rank 0 has 9 + 5, rank 1 has 4 + 3, rank 2 has 2 + 1: of swaps with rank 1 the best leaves 2
    # above the limit of 10, with rank 2 none: 9 for 2.
    load_LE, rank_LE = np.array([[9.0, 5.0, 4.0, 3.0, 2.0, 1.0]]), np.array([[0, 0, 1, 1, 2, 2]])
    limit_L = np.array([10.0])
    assert not settle(load_LE, rank_LE, limit_L, deadline_s=-math.inf).any()
    assert rank_LE.tolist() == [[0, 0, 1, 1, 2, 2]]
    assert settle(load_LE, rank_LE, limit_L).all()
    assert rank_LE.tolist() == [[2, 0, 1, 1, 0, 2]]
