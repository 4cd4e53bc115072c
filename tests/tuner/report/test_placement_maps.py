import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.rows import each_row
from tuner.errors import PlanUnreadableError
from tuner.goals.place_folder import read_place_plan
from tuner.report.content import Evidence, Report
from tuner.report.heat_map import HeatMap, heat_map_figure
from tuner.report.place_page import place_report
from tuner.report.placement_maps import MOST_MAPS, read_heat_maps


def test_maps_are_read_back_in_the_order_of_the_workloads(place_folder: Path) -> None:
    plan = read_place_plan(place_folder)
    maps = read_heat_maps(place_folder, plan.files)
    assert [heat.title for heat in maps] == [one.name for one in plan.goal.workloads]
    stored = json.loads((place_folder / "report" / "heat_map_1.json").read_text(encoding="utf-8"))
    for name, panel in maps[1].panels.items():
        assert np.array_equal(panel, stored["panels"][name]["load_ratio"])


@each_row(
    "text",
    [
        *("{", "{}", '{"title": "x", "layer_ids": [0], "panels": {}}'),
        *(
            f'{{"title": "x", "layer_ids": [0], "panels": {{{panels}}}}}'
            for panels in (
                '"a": {"load_ratio": [["x"]]}',
                '"a": {"load_ratio": [[-1.0]]}',
                '"a": {"load_ratio": [[NaN]]}',
                '"a": {"load_ratio": [[]]}',
                '"a": {"load_ratio": [[1.0], [1.0]]}',
                '"a": {"load_ratio": [[1.0]]}, "b": {"load_ratio": [[1.0, 1.0]]}',
            )
        ),
    ],
)
def test_a_damaged_map_is_named(text: str, place_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(place_folder, tmp_path / f"{hash(text)}"))
    (folder / "report" / "heat_map_0.json").write_text(text, encoding="utf-8")
    with pytest.raises(PlanUnreadableError, match=r"heat_map_0\.json: no heat map in it"):
        read_heat_maps(folder, ("report/heat_map_0.json",))


def test_names_that_are_no_maps_are_ignored(place_folder: Path) -> None:
    names = ("report/heat_map_x.json", "report/heat_map_0.svg", "launch/heat_map_0.json")
    assert read_heat_maps(place_folder, names) == ()


def test_many_large_maps_keep_the_page_small(
    place_folder: Path, page_of: Callable[[Report], str]
) -> None:
    plan = read_place_plan(place_folder)
    load_LG = np.random.default_rng(1).lognormal(size=(128, 512))
    heat = HeatMap(
        title="chat", layer_ids=tuple(range(128)), panels={"before": load_LG, "after": load_LG}
    )
    page = page_of(
        place_report(
            plan,
            Evidence(maps=(heat,) * MOST_MAPS),
        )
    )
    assert len(page.encode()) < 3_000_000


def test_panels_share_one_scale_whose_middle_is_one(place_folder: Path) -> None:
    (heat, *_) = read_heat_maps(place_folder, read_place_plan(place_folder).files)
    figure = heat_map_figure(heat, name="n", title="t", reading="r.", across="rank")
    before, after = figure.traces
    largest = max(float(panel.max()) for panel in heat.panels.values())
    for trace in (before, after):
        assert (trace["zmin"], trace["zmax"]) == (0.0, pytest.approx(largest))
        assert trace["colorscale"][1][0] == pytest.approx(1.0 / largest)
    assert np.allclose(before["z"], heat.panels["before"], rtol=1e-3)
    assert [trace["showscale"] for trace in figure.traces] == [False, True]
