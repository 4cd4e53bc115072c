"""Placements measured with a fake device."""

from collections.abc import Sequence

import numpy as np
import pytest

from tuner.cli.text import whole_text
from tuner.config.place import PlaceDecision
from tuner.report.trials import trials_section
from tuner.verify.placement import rows_of_slots, verify_placements
from tuner.verify.placement_records import PlaceVerified


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


def verified(plan: PlaceDecision, current: PlaceDecision) -> PlaceVerified:
    return verify_placements(
        {"plan": plan, "as it runs": current},
        load_LE=LOAD_LE,
        time_loads=a_second_a_row,
        price_loads=lambda rows, active: 0.5 * rows,
    )


def test_the_slowest_rank_of_every_layer_counts() -> None:
    better = verified(MIXED, IN_ORDER)
    # Mixed: 10 and 8 rows; in order: 12 and 14.
    assert [one.measured_layer_time_s for one in better.trials] == [9.0, 13.0]
    assert [one.predicted_layer_time_s for one in better.trials] == [4.5, 6.5]
    assert (better.winner, better.regret_ratio, better.layers) == ("plan", 0.0, (3, 4))
    worse = verified(IN_ORDER, MIXED)
    assert worse.winner == "as it runs"
    assert worse.regret_ratio == pytest.approx(13.0 / 9.0 - 1.0)
    for made, words in ((better, "it is the winner"), (worse, "44.4 % behind the winner")):
        assert words in whole_text(trials_section(made, None))


def test_replicas_share_rows_and_lose_none() -> None:
    rows = rows_of_slots((0, 1, 2, 0, 3, 0), np.array([8.0, 4.0, 2.0, 2.0]))
    assert rows == [3, 4, 2, 3, 2, 2]
