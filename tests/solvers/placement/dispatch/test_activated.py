import numpy as np

from solvers.placement.dispatch.activated import schedule
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.ranks import Placement, Ranks
from tests.solvers.placement.dispatch.testing import sample_case


def test_a_replicated_expert_goes_whole_to_the_rank_with_the_fewest_activated() -> None:
    # Rank 0 holds experts 0, 1, 2; rank 1 holds 2, 3 and 3 again. Pass 0 activates all: rank 0 has
    # two of its own, rank 1 one, so expert 2 goes to rank 1. In pass 1 nobody wants expert 0 or 1.
    case = DispatchCase(
        load_PLE=np.array([[[5.0, 5.0, 7.0, 1.0]], [[0.0, 0.0, 7.0, 9.0]]]),
        placement=Placement(expert_LS=np.array([[0, 1, 2, 2, 3, 3]])),
        ranks=Ranks.uniform(ranks=2, slots_per_rank=3),
    )
    loads, active = schedule(case)
    assert active[:, 0].tolist() == [[2, 2], [1, 1]]
    assert loads[:, 0].tolist() == [[10.0, 8.0], [7.0, 9.0]]


def test_it_reads_each_activated_expert_once() -> None:
    ranks = Ranks.uniform(ranks=4, slots_per_rank=4)
    case = sample_case(passes=6, layers=3, experts=10, ranks=ranks, seed=2, tokens=0.7)
    _, active = schedule(case)
    assert np.array_equal(active.sum(axis=2), (case.load_PLE > 0.0).sum(axis=2))
    # Splitting would read an activated expert on every host.
    split = (case.load_PLE > 0.0).transpose(1, 0, 2).astype(np.int64) @ (case.copies_LEG > 0)
    assert (active <= split.transpose(1, 0, 2)).all()
