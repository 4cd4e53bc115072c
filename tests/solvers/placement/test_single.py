import numpy as np

from solvers.placement.ranks import Ranks, placed
from tests.solvers.placement.testing import all_assignments, rank_of_expert


def test_slots_follow_ranks_with_experts_ascending() -> None:
    placement = placed(np.array([[1, 0, 1, 0], [0, 0, 1, 1]]))
    assert placement.expert_LS.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]


def test_ranks_are_read_back() -> None:
    ranks = Ranks(slots_G=np.array([1, 3]), node_G=np.array([0, 0]), speed_G=np.ones(2))
    rank_LE = np.array([[1, 1, 0, 1], [0, 1, 1, 1]])
    assert (rank_of_expert(placed(rank_LE), ranks) == rank_LE).all()


def test_every_assignment_is_listed_once() -> None:
    for slots_G, ways in (
        ((2, 2), 6),
        ((1, 1, 1), 6),
        ((2, 1, 2), 30),
    ):
        rank_XE = all_assignments(slots_G)
        assert len(np.unique(rank_XE, axis=0)) == len(rank_XE) == ways
        assert all((np.bincount(row_E) == slots_G).all() for row_E in rank_XE)
