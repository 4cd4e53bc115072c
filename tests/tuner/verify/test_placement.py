"""Placements measured with a fake device."""

from collections.abc import Sequence

import numpy as np
import pytest

from tuner.config.place import PlaceDecision
from tuner.verify.placement import rows_of_slots, verify_placements


def decision(*rows: Sequence[int]) -> PlaceDecision:
    return PlaceDecision(
        physical_to_logical=tuple(tuple(row) for row in rows),
        layer_ids=tuple(range(3, 3 + len(rows))),
        num_experts=4,
        ranks=2,
        ranks_per_node=2,
        slots_per_rank=(len(rows[0]) // 2,) * 2,
    )


def a_second_a_row(
    rows_NS: Sequence[Sequence[int]],
) -> tuple[str, tuple[tuple[float, ...], ...]]:
    return "fake", tuple((float(sum(rows)),) * 3 for rows in rows_NS)


LOAD_LE = np.array([[8.0, 4.0, 2.0, 2.0], [1.0, 1.0, 7.0, 7.0]])
IN_ORDER = decision([0, 1, 2, 3], [0, 1, 2, 3])
MIXED = decision([0, 2, 1, 3], [0, 2, 1, 3])


def test_the_slowest_rank_of_every_layer_counts() -> None:
    verified = verify_placements(
        {"plan": MIXED, "as it runs": IN_ORDER},
        load_LE=LOAD_LE,
        time_loads=a_second_a_row,
        price_loads=None,
    )
    plan, runs = verified.trials
    # In order: 12 and 14 rows; mixed: 10 and 8.
    assert runs.measured_layer_time_s == 13.0
    assert plan.measured_layer_time_s == 9.0
    assert verified.winner == "plan"
    assert verified.regret_ratio == 0.0
    assert verified.layers == (3, 4)


def test_a_plan_that_loses_has_regret() -> None:
    verified = verify_placements(
        {"plan": IN_ORDER, "as it runs": MIXED},
        load_LE=LOAD_LE,
        time_loads=a_second_a_row,
        price_loads=None,
    )
    assert verified.winner == "as it runs"
    assert verified.regret_ratio == pytest.approx(13.0 / 9.0 - 1.0)


def test_a_prediction_is_of_the_same_loads() -> None:
    verified = verify_placements(
        {"plan": MIXED, "as it runs": IN_ORDER},
        load_LE=LOAD_LE,
        time_loads=a_second_a_row,
        price_loads=lambda rows, active: 0.5 * rows,
    )
    plan, runs = verified.trials
    assert plan.predicted_layer_time_s == 4.5
    assert runs.predicted_layer_time_s == 6.5


def test_replicas_share_rows_and_lose_none() -> None:
    rows = rows_of_slots((0, 1, 2, 0, 3, 0), np.array([8.0, 4.0, 2.0, 2.0]))
    assert rows == [3, 4, 2, 3, 2, 2]
