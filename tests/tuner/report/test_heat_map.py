import json
from typing import Any

import numpy as np
import pytest

from tuner.report.heat_map import HeatMap, blocks, heat_map_figure, heat_map_json


def _heat(**changes: Any) -> HeatMap:
    fields: dict[str, Any] = {
        "title": "chat",
        "layer_ids": (3, 5),
        "panels": {
            "before": np.array([[0.5, 1.5, 1.0], [2.0, 0.0, 1.0]]),
            "after": np.array([[1.0, 1.0, 1.0], [1.1, 0.9, 1.0]]),
        },
    }
    return HeatMap(**(fields | changes))


def test_the_json_holds_every_number_and_the_largest() -> None:
    record = json.loads(heat_map_json(_heat()))
    assert record["title"] == "chat"
    assert record["layer_ids"] == [3, 5]
    assert list(record["panels"]) == ["before", "after"]
    before = record["panels"]["before"]
    assert before["load_ratio"] == [[0.5, 1.5, 1.0], [2.0, 0.0, 1.0]]
    assert before["largest_ratio"] == 2.0
    # (1.5 + 2.0) / 2
    assert before["mean_of_largest_ratio"] == 1.75


def test_a_large_map_is_drawn_in_blocks_that_keep_the_hottest_rank() -> None:
    loads = np.random.default_rng(0).uniform(0.5, 1.5, (300, 3000))
    loads[211, 1234] = 9.0
    drawn = blocks(loads, 128, 256)
    assert drawn.shape == (128, 256)
    assert np.argwhere(drawn == 9.0).tolist() == [[211 * 128 // 300, 1234 * 256 // 3000]]
    figure = heat_map_figure(
        _heat(layer_ids=tuple(range(300)), panels={"now": loads}),
        **{"name": "n", "title": "t", "reading": "r.", "across": "rank"},
    )
    assert "Blocks show their largest load" in figure.reading


def test_panels_have_a_row_for_each_layer() -> None:
    with pytest.raises(ValueError, match="1 layers; every panel needs a row for each"):
        _heat(layer_ids=(1,))
