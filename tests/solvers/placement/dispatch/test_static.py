import numpy as np

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.registry import rank_loads
from solvers.placement.dispatch.static import targets
from solvers.placement.ranks import Placement, Ranks

RANKS = Ranks.alike(ranks=6, slots_per_rank=1, ranks_per_node=2)


def test_own_rank_then_own_node_then_a_draw() -> None:
    # Replicas on ranks 0 and 3, nodes {0, 1}, {2, 3}, {4, 5}.
    target = targets(np.array([0, 3]), ranks=RANKS, rng=np.random.default_rng(0))
    assert target[:4].tolist() == [0, 0, 3, 3]
    assert set(target[4:].tolist()) <= {0, 3}


def test_the_first_replica_of_a_node_serves_it() -> None:
    ranks = Ranks.alike(ranks=8, slots_per_rank=1, ranks_per_node=4)
    target = targets(np.array([1, 2, 5]), ranks=ranks, rng=np.random.default_rng(0))
    assert target.tolist() == [1, 1, 2, 1, 5, 5, 5, 5]


def test_replicas_that_are_all_on_one_node_are_drawn_from_by_all() -> None:
    ranks = Ranks.alike(ranks=200, slots_per_rank=1, ranks_per_node=100)
    hosts = np.array([3, 7])
    target = targets(hosts, ranks=ranks, rng=np.random.default_rng(0))
    assert target[hosts].tolist() == [3, 7]
    # 198 draws of two equal chances: 99 each, standard deviation 7.
    assert 75 < np.count_nonzero(target == 3) < 125


def test_sources_that_send_more_load_the_replica_they_use() -> None:
    # One expert on ranks 0 and 1; rank 0 holds three quarters of its tokens.
    case = DispatchCase(
        load_PLE=np.array([[[8.0]], [[4.0]]]),
        placement=Placement(expert_LS=np.array([[0, 0]])),
        ranks=Ranks.alike(ranks=2, slots_per_rank=1),
        source_HLE=np.array([[[30.0]], [[10.0]]]),
    )
    assert rank_loads("static", case)[:, 0].tolist() == [[6.0, 2.0], [3.0, 1.0]]


def test_an_expert_that_no_source_sent_is_taken_as_sent_by_all() -> None:
    case = DispatchCase(
        load_PLE=np.array([[[8.0]]]),
        placement=Placement(expert_LS=np.array([[0, 0]])),
        ranks=Ranks.alike(ranks=2, slots_per_rank=1),
        source_HLE=np.zeros((2, 1, 1)),
    )
    assert rank_loads("static", case)[0, 0].tolist() == [4.0, 4.0]
