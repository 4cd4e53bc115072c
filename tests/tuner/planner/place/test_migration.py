"""Counting and pricing a move between placements."""

import numpy as np

from solvers.placement.ranks import Placement, Ranks
from tuner.planner.place.migration import loaded_G, migration_cost

RANKS = Ranks.alike(ranks=2, slots_per_rank=3)


def table(*rows: list[int]) -> Placement:
    return Placement(expert_LS=np.array(rows))


def test_another_slot_of_the_same_rank_is_no_move() -> None:
    loaded = loaded_G(table([0, 1, 2, 3, 0, 1]), table([2, 1, 0, 1, 3, 0]), ranks=RANKS)
    assert loaded.tolist() == [0, 0]


def test_a_rank_loads_what_it_lacked() -> None:
    before, after = table([0, 1, 2, 3, 0, 1]), table([0, 3, 2, 3, 2, 1])
    # Rank 0 lacked 3, rank 1 lacked 2.
    assert loaded_G(before, after, ranks=RANKS).tolist() == [1, 1]


def test_a_second_copy_on_the_same_rank_is_not_loaded_twice() -> None:
    before, after = table([0, 1, 2, 3, 0, 1]), table([3, 3, 2, 0, 1, 0])
    assert loaded_G(before, after, ranks=RANKS).tolist() == [1, 0]


def test_without_a_machine_moves_are_counted_and_not_priced() -> None:
    cost = migration_cost(
        table([0, 1, 2, 3, 0, 1]),
        table([0, 3, 2, 3, 2, 1]),
        ranks=RANKS,
        machine=None,
        gain_ratio=0.1,
    )
    assert cost.moved_experts == 2
    assert cost.moved_bytes is None
    assert cost.break_even_s is None
