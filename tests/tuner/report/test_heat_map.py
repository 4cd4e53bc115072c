import json
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.rows import each_row
from tuner.report.heat_map import MOST_COLUMNS, MOST_ROWS, HeatMap, heat_map_json, heat_map_svg

SVG = "{http://www.w3.org/2000/svg}"


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


def _picture(heat: HeatMap) -> ElementTree.Element:
    return ElementTree.fromstring(heat_map_svg(heat))


def _painted(heat: HeatMap) -> list[dict[tuple[int, int], str]]:
    """Return, panel by panel, the colour of each drawn (row, column)."""
    panels = []
    for group in _picture(heat).iter(f"{SVG}g"):
        paths = group.findall(f"{SVG}path")
        if not paths:
            continue
        cells: dict[tuple[int, int], str] = {}
        for path in paths:
            for run in filter(None, path.attrib["d"].split("M")):
                start, _, rest = run.partition("h")
                column, row = map(int, start.split())
                width, _, tail = rest.partition("v")
                assert tail == f"1h-{width}z"
                for each in range(column, column + int(width)):
                    assert (row, each) not in cells
                    cells[row, each] = path.attrib["fill"]
        panels.append(cells)
    return panels


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


def test_every_cell_is_painted_once_and_equal_loads_have_one_colour() -> None:
    before, after = _painted(_heat())
    assert set(before) == set(after) == {(row, column) for row in range(2) for column in range(3)}
    assert before[0, 2] == before[1, 2] == after[0, 0] == after[1, 2] == "#f7f7f7"
    # The largest is the end of the red scale, an idle rank the end of the blue one.
    assert before[1, 0] == "#b2182b"
    assert before[1, 1] == "#2166ac"


def test_the_picture_says_in_words_what_it_shows() -> None:
    root = _picture(_heat())
    assert root.attrib["role"] == "img"
    described = {element.attrib["id"]: element.text for element in (root[0], root[1])}
    assert root.attrib["aria-labelledby"].split() == list(described)
    assert described["title"] == "Rank loads of chat"
    assert "before: mean over layers of the largest 1.750, largest 2.000" in str(
        described["description"]
    )
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"before", "after", "layer", "rank", "3", "5", "2.00"} <= set(texts)


@each_row(
    "name", ["</title><script>alert(1)</script>", "a & b", '"quoted"', "bell\x07", "\x1b[2J", "\0"]
)
def test_nothing_in_a_name_becomes_an_element(name: str) -> None:
    heat = _heat(title=name, panels={name: np.ones((2, 3))})
    root = _picture(heat)
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags == {"svg", "title", "desc", "rect", "g", "text", "path"}
    assert json.loads(heat_map_json(heat))["title"] == name


def test_a_large_map_is_drawn_in_blocks_that_keep_the_hottest_rank() -> None:
    loads = np.random.default_rng(0).uniform(0.5, 1.5, (300, 3000))
    loads[211, 1234] = 9.0
    heat = _heat(layer_ids=tuple(range(300)), panels={"now": loads})
    (cells,) = _painted(heat)
    assert len(cells) == MOST_ROWS * MOST_COLUMNS
    hottest = [place for place, colour in cells.items() if colour == "#b2182b"]
    assert hottest == [(211 * MOST_ROWS // 300, 1234 * MOST_COLUMNS // 3000)]
    assert len(heat_map_svg(heat)) < 1_000_000
    assert "Blocks show their largest load" in heat_map_svg(heat)


def test_even_loads_draw_without_a_scale_above_one() -> None:
    (cells,) = _painted(_heat(panels={"even": np.ones((2, 3))}))
    assert set(cells.values()) == {"#f7f7f7"}


@each_row(
    ("changes", "message"),
    [
        ({"panels": {}}, "one shape"),
        ({"panels": {"a": np.ones((2, 3)), "b": np.ones((2, 4))}}, "one shape"),
        ({"layer_ids": (1,)}, "1 layers, but panels of shape"),
        ({"panels": {"a": np.full((2, 3), np.nan)}}, "non-negative"),
        ({"panels": {"a": np.full((2, 3), -1.0)}}, "non-negative"),
        ({"panels": {"a": np.ones((2, 0))}}, "panels of shape"),
    ],
)
def test_what_is_no_map_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _heat(**changes)
