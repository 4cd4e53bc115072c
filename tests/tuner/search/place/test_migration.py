"""Counting and pricing a move between placements."""

import numpy as np

from solvers.placement.balance.migration import loaded_LG
from solvers.placement.ranks import Placement, Ranks
from tuner.search.place.migration import migration_cost

RANKS = Ranks.uniform(ranks=2, slots_per_rank=3)


def table(*rows: list[int]) -> Placement:
    return Placement(expert_LS=np.array(rows))


def test_another_slot_of_the_same_rank_is_no_move() -> None:
    loaded = loaded_LG(table([0, 1, 2, 3, 0, 1]), table([2, 1, 0, 1, 3, 0]), ranks=RANKS)
    assert loaded.tolist() == [[0, 0]]


def test_a_rank_loads_what_it_lacked() -> None:
    before, after = table([0, 1, 2, 3, 0, 1]), table([0, 3, 2, 3, 2, 1])
    # Rank 0 lacked 3, rank 1 lacked 2.
    assert loaded_LG(before, after, ranks=RANKS).tolist() == [[1, 1]]


def test_a_second_copy_on_the_same_rank_is_not_loaded_twice() -> None:
    before, after = table([0, 1, 2, 3, 0, 1]), table([3, 3, 2, 0, 1, 0])
    assert loaded_LG(before, after, ranks=RANKS).tolist() == [[1, 0]]


def test_more_slots_than_today_are_loaded_where_they_hold_something_new() -> None:
    today = Ranks.uniform(ranks=2, slots_per_rank=2)
    loaded = loaded_LG(
        table([0, 1, 2, 3]), table([0, 1, 2, 2, 3, 0]), ranks=RANKS, current_ranks=today
    )
    assert loaded.tolist() == [[1, 1]]


def test_moves_are_sized_where_a_model_is_known_and_priced_where_a_machine_is() -> None:
    counted, sized = (
        migration_cost(
            table([0, 1, 2, 3, 0, 1]),
            table([0, 3, 2, 3, 2, 1]),
            current_ranks=RANKS,
            ranks=RANKS,
            expert_bytes=expert_bytes,
            machine=None,
            step_gain_ratio=None,
        )
        for expert_bytes in (None, 1000.0)
    )
    assert (counted.moved_experts, counted.moved_bytes) == (2, None)
    assert (sized.moved_experts, sized.moved_bytes) == (2, 2000)
    assert sized.transfer_s is None
    assert sized.break_even_s is None
