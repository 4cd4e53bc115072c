"""Counting and pricing a move between placements."""

import json
from pathlib import Path

import numpy as np

from solvers.placement.balance.migration import loaded_LG
from solvers.placement.ranks import Placement, Ranks
from tuner.goals.place_spec import read_place_spec
from tuner.search.place.plan_place import migration_cost, state_problem
from tuner.search.settings import SearchSettings

MODELS = Path(__file__).parents[4] / "examples" / "models"
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
    assert loaded_LG(
        table([0, 1, 2, 3]), table([0, 1, 2, 2, 3, 0]), ranks=RANKS, current_ranks=today
    ).tolist() == [[1, 1]]


def test_moves_are_sized_where_a_model_is_known(tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text(
        json.dumps(
            {
                "num_logical_experts": 8,
                "top_k": 2,
                "layer_ids": [0, 1],
                "logical_count": [[9] * 8] * 2,
            }
        )
    )
    (tmp_path / "current.json").write_text(json.dumps([[*range(8)], [*range(8)]]))
    found = []
    for model in ("", f"model: {MODELS / 'mixtral-8x7b'}\n"):
        spec = tmp_path / "spec.yaml"
        spec.write_text(
            f"schema_version: 1\n{model}goal:\n  kind: place\n  ranks: 2\n"
            "  current: current.json\n  workloads: [{name: chat, path: chat.json}]\n"
        )
        problem = state_problem(read_place_spec(spec), settings=SearchSettings())
        found.append(
            migration_cost(
                problem, table([0, 4, 2, 3, 1, 5, 6, 7], [*range(8)]), step_gain_ratio=None
            )
        )
    counted, sized = found
    assert (counted.moved_experts, counted.moved_bytes) == (2, None)
    # 3 x 4,096 x 14,336 weights of two bytes.
    assert (sized.moved_experts, sized.moved_bytes) == (2, 2 * 3 * 4096 * 14336 * 2)
    assert sized.transfer_s is None
    assert sized.break_even_s is None
