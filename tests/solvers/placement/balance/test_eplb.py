import numpy as np
import pytest

from solvers.placement.balance.eplb import eplb
from solvers.placement.ranks import Floats, Ranks

LOAD_LE = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    dtype=float,
)
"""The example of EPLB's own description: 12 experts in 4 groups, 2 nodes of 4 ranks, 16 slots."""


def test_places_the_published_example_as_published() -> None:
    ranks = Ranks.uniform(ranks=8, slots_per_rank=2, ranks_per_node=4)
    assert eplb(LOAD_LE, ranks=ranks, num_groups=4).expert_LS.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


def test_groups_stay_on_one_node() -> None:
    ranks = Ranks.uniform(ranks=8, slots_per_rank=2, ranks_per_node=4)
    for row in eplb(LOAD_LE, ranks=ranks, num_groups=4).expert_LS:
        first, second = ({int(expert) // 3 for expert in half} for half in (row[:8], row[8:]))
        assert not first & second


def test_groups_that_do_not_divide_over_the_nodes_are_placed_globally() -> None:
    two_nodes = Ranks.uniform(ranks=8, slots_per_rank=2, ranks_per_node=4)
    one_node = Ranks.uniform(ranks=8, slots_per_rank=2)
    placed = [
        eplb(LOAD_LE, ranks=two_nodes, num_groups=1),
        eplb(LOAD_LE, ranks=two_nodes, num_groups=3),
        eplb(LOAD_LE, ranks=one_node, num_groups=4),
    ]
    assert len({placement.expert_LS.tobytes() for placement in placed}) == 1


def by_hand(load_E: Floats, num_ranks: int, per_rank: int) -> list[list[int]]:
    """The description, item by item, with Python's own sums."""
    num_experts = len(load_E)
    copies, experts = [1] * num_experts, list(range(num_experts))
    while len(experts) < num_ranks * per_rank:
        most = max(range(num_experts), key=lambda e: (load_E[e] / copies[e], -e))
        copies[most] += 1
        experts.append(most)
    share = [float(load_E[e]) / copies[e] for e in experts]
    work, held = [0.0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for slot in sorted(range(len(experts)), key=lambda s: -share[s]):
        rank = min([g for g in range(num_ranks) if len(held[g]) < per_rank], key=lambda g: work[g])
        held[rank].append(experts[slot])
        work[rank] += share[slot]
    return held


def test_the_global_policy_follows_the_description() -> None:
    for num_ranks, per_rank in (
        (4, 3),
        (2, 6),
        (3, 5),
    ):
        load_LE = 2.0 ** np.random.default_rng(5).permuted(np.tile(np.arange(10.0), (4, 1)), axis=1)
        ranks = Ranks.uniform(ranks=num_ranks, slots_per_rank=per_rank)
        placed = eplb(load_LE, ranks=ranks).expert_LS.reshape(4, num_ranks, per_rank)
        for load_E, row in zip(load_LE, placed.tolist(), strict=True):
            assert row == by_hand(load_E, num_ranks, per_rank)


def test_refuses_what_the_hierarchical_policy_cannot_divide() -> None:
    ranks = Ranks.uniform(ranks=4, slots_per_rank=4, ranks_per_node=2)
    with pytest.raises(ValueError, match="12 experts do not divide into 8 groups"):
        eplb(LOAD_LE, ranks=ranks, num_groups=8)
    uneven = Ranks(
        slots_G=np.array([4, 4, 5, 3]), node_G=np.array([0, 0, 1, 1]), speed_G=np.ones(4)
    )
    with pytest.raises(ValueError, match="needs equal ranks"):
        eplb(LOAD_LE, ranks=uneven, num_groups=4)
