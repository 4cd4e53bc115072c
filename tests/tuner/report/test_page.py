"""The page of every kind of plan, read as a browser or a screen reader would."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.rows import each_row
from tuner.errors import PlanUnreadableError
from tuner.goals.registry import goal_of_folder

Page = Callable[[Any], str]
Parsed = Callable[[str], Any]
Shown = Callable[[str], Any]
KINDS = ("verified", "train", "serve", "place")

MOST_BYTES = 3_000_000
"""Of a page without Plotly's script."""


def at(values: Any, path: str) -> Any:
    """Follow a path such as `predicted.stages.0.forward_s`; a key may hold dots itself."""
    if not path:
        return values
    if isinstance(values, list):
        head, _, rest = path.partition(".")
        return at(values[int(head)], rest)
    for key in sorted(values, key=len, reverse=True):
        if path == key or path.startswith(f"{key}."):
            return at(values[key], path[len(key) + 1 :])
    raise KeyError(path)


@each_row("kind", KINDS)
def test_every_number_with_a_place_in_the_plan_equals_it(shown: Shown, kind: str) -> None:
    plan = shown(kind).plan
    keyed = [node for node in shown(kind).page.all() if "data-key" in node.attributes]
    assert len(keyed) > 10
    for node in keyed:
        key = node.attributes["data-key"]
        assert float(node.attributes["data-value"]) == pytest.approx(at(plan, key), abs=0), key
        assert re.search(r"\d", node.text), key


def test_drawn_numbers_of_stages_are_the_plans(
    shown: Shown,
) -> None:
    (script,) = shown("train").page.all("script", id="data-of-figures")
    figures = {figure["name"]: figure for figure in json.loads(script.text)}
    predicted = shown("train").plan["predicted"]
    forward, backward = figures["stage-time"]["traces"]
    assert forward["y"] == [stage["forward_s"] for stage in predicted["stages"]]
    assert backward["y"] == [stage["backward_s"] for stage in predicted["stages"]]
    own = {
        trace["name"]: trace["x"][0] for trace in figures["breakdown"]["traces"] if trace["x"][0]
    }
    assert sum(own.values()) == pytest.approx(predicted["step_time_s"])


@each_row("kind", KINDS)
def test_every_plot_has_words_and_a_table_that_say_the_same(shown: Shown, kind: str) -> None:
    report, page = shown(kind).report, shown(kind).page
    plots = page.all("div", class_="plot")
    assert [plot.attributes["id"] for plot in plots] == [
        f"plot-{figure.name}" for figure in report.figures
    ]
    for plot in plots:
        assert plot.attributes["role"] == "img"
        for name in ("aria-labelledby", "aria-describedby"):
            (described,) = page.all(id=plot.attributes[name])
            assert described.text.strip()
    for figure in page.all("figure"):
        (table,) = figure.all("table")
        assert table.all("caption")
        assert all(head.attributes["scope"] == "col" for head in table.all("thead")[0].all("th"))
        assert all(
            row.all("th")[0].attributes["scope"] == "row" for row in table.all("tbody")[0].all("tr")
        )


@each_row("kind", KINDS)
def test_ids_are_unique_and_links_lead_somewhere(shown: Shown, kind: str) -> None:
    page = shown(kind).page
    ids = [node.attributes["id"] for node in page.all() if "id" in node.attributes]
    assert len(ids) == len(set(ids))
    for link in page.all("a"):
        assert link.attributes["href"].removeprefix("#") in ids
    for button in page.all("button"):
        assert button.attributes["data-copies"] in ids
        assert button.attributes["aria-label"].startswith("Copy launch/")


@each_row("kind", KINDS)
def test_headings_follow_one_another_without_gaps(shown: Shown, kind: str) -> None:
    page = shown(kind).page
    levels = [int(node.tag[1]) for node in page.all() if re.fullmatch(r"h[1-6]", node.tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


@each_row("kind", KINDS)
def test_only_the_pages_own_scripts_may_run_and_nothing_may_be_fetched(
    shown: Shown, kind: str
) -> None:
    page = shown(kind).page
    (policy,) = page.all("meta", http_equiv="Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.attributes["content"].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'none'"
    run = [node for node in page.all("script") if "type" not in node.attributes]
    hashes = {
        f"'sha256-{base64.b64encode(hashlib.sha256(node.text.encode()).digest()).decode()}'"
        for node in run
    }
    assert set(rules["script-src"].split()) == hashes
    for node in page.all():
        assert not {"src", "srcset", "action", "onclick", "onload"} & node.attributes.keys()
        assert node.tag not in ("img", "iframe", "link", "object", "embed", "base", "form")


@each_row("kind", KINDS)
def test_a_page_without_plotly_is_small(shown: Shown, kind: str) -> None:
    assert len(shown(kind).html.encode()) < MOST_BYTES


def test_launch_files_are_shown_whole(train_folder: Path, shown: Shown) -> None:
    files = {
        node.all("summary")[0].text: node.all("code")[0].text
        for node in shown("train").page.all("details", class_="file")
    }
    assert files
    for name, text in files.items():
        assert text == (train_folder / name).read_text(encoding="utf-8")


def test_trials_are_shown_beside_what_was_predicted(verified_folder: Path, shown: Shown) -> None:
    page = shown("verified").page
    verified = json.loads((verified_folder / "verified.json").read_text(encoding="utf-8"))
    (place,) = page.all("div", id="plot-trials")
    assert place
    (script,) = page.all("script", id="data-of-figures")
    (figure,) = [one for one in json.loads(script.text) if one["name"] == "trials"]
    predicted, corrected, measured = figure["traces"]
    assert predicted["y"] == [trial["predicted_step_s"] for trial in verified["trials"]]
    assert corrected["y"] == [trial["recalibrated_step_s"] for trial in verified["trials"]]
    assert measured["y"] == [trial["measured_step_s"] for trial in verified["trials"]]
    assert "fastest of 8 trials" in page.all("header")[0].text


def test_an_infeasible_plan_names_the_binding_constraint(
    train_folder: Path, page_of: Page, parsed: Parsed, copied: Callable[[Path], Path]
) -> None:
    folder = copied(train_folder)
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    plan |= {"decision": None, "predicted": None, "alternatives": [], "preferred": None}
    plan["certificate"] |= {"status": "infeasible", "objective": None, "bound": None}
    plan["binding_constraint"] = "memory_per_device: 3 GiB short"
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    page = parsed(page_of(goal_of_folder(folder).report(folder)))
    (header,) = page.all("header", class_="nothing")
    assert "memory_per_device: 3 GiB short" in header.text
    assert not page.all("div", class_="plot")


def test_a_plan_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"goal": {"kind": "dance"}}', encoding="utf-8")
    with pytest.raises(PlanUnreadableError, match="'dance' is not one of train, serve"):
        goal_of_folder(tmp_path).report(tmp_path)


def test_a_plan_that_disagrees_with_itself_is_refused(
    train_folder: Path, copied: Callable[[Path], Path]
) -> None:
    folder = copied(train_folder)
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    plan["predicted"]["stages"].pop()
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    with pytest.raises(PlanUnreadableError, match=r"predicted: not of the decision's .* stages"):
        goal_of_folder(folder).report(folder)


def test_a_number_that_json_lacks_is_not_drawn(
    verified_folder: Path, page_of: Page, parsed: Parsed, copied: Callable[[Path], Path]
) -> None:
    folder = copied(verified_folder)
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    plan["predicted"]["peak_memory_bytes_band"][0][1] = float("inf")
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    page = parsed(page_of(goal_of_folder(folder).report(folder)))
    figures = {
        one["name"]: one for one in json.loads(page.all("script", type="application/json")[0].text)
    }
    assert figures["peak"]["traces"][-1]["error_y"]["array"][0] is None
