"""Names that try to become markup, in every text of a plan that a user or a file can choose."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.expect import present
from tests.rows import each_row
from tuner.goals.place_folder import read_place_plan
from tuner.goals.train_folder import read_plan
from tuner.plans.folder import read_verified_as
from tuner.plans.serve import ServePlan
from tuner.report.content import Cell, Evidence, File, Report
from tuner.report.launch_section import launch_section
from tuner.report.markdown import markdown
from tuner.report.place_page import place_report
from tuner.report.placement_maps import read_heat_maps
from tuner.report.serve_page import serve_report
from tuner.report.train_page import train_report
from tuner.verify.records import Verified, read_trials

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
    "<a href='https://evil.example'>x</a>%{x}\u202e\u2028`|@all\n# h"
)
KINDS = ("train", "serve", "place")
Page = Callable[[Report], str]
Parsed = Callable[[str], Any]

KEPT = frozenset({"status", "kind", "role", "pool", "mode", "schedule", "dispatcher", "objective"})
"""Fields with few legal values, or that other fields refer to by name."""


def poisoned(record: BaseModel) -> Any:
    """Return a record whose free texts are hostile, deep inside too; nothing is validated."""
    changes = {
        name: _poisoned(getattr(record, name))
        for name in type(record).model_fields
        if name not in KEPT and name != "path"
    }
    return record.model_copy(update=changes)


def _poisoned(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return poisoned(value)
    if type(value) is str:
        return HOSTILE
    if isinstance(value, tuple):
        return tuple(_poisoned(one) for one in value)
    if isinstance(value, dict):
        return {f"{name}{HOSTILE}": _poisoned(one) for name, one in value.items()}
    return value


@pytest.fixture(scope="module")
def hostile(
    verified_folder: Path, serve_plan: ServePlan, place_folder: Path
) -> Mapping[str, Report]:
    """A report of each kind."""
    files = (File(path=f"launch/{HOSTILE}", text=HOSTILE, shown_bytes=9),)
    verified = present(read_verified_as(Verified, verified_folder))
    train = train_report(
        poisoned(read_plan(verified_folder)),
        Evidence(
            verified=poisoned(verified),
            trials=tuple(map(poisoned, read_trials(verified_folder / "trials"))),
            files=files,
        ),
    )
    serve = serve_report(poisoned(serve_plan), Evidence(files=files, replay=None, what_if=None))
    plan = read_place_plan(place_folder)
    maps = read_heat_maps(place_folder, plan.files)
    place = place_report(poisoned(plan), Evidence(maps=maps, files=files))
    return {"train": train, "serve": serve, "place": place}


@each_row("kind", KINDS)
def test_no_name_becomes_markup(
    hostile: Mapping[str, Report], page_of: Page, parsed: Parsed, kind: str
) -> None:
    html = page_of(hostile[kind])
    page = parsed(html)
    assert len(page.all("script")) == 3
    assert not page.all("img")
    assert {link.attributes["href"][0] for link in page.all("a")} == {"#"}
    assert HOSTILE.split("\u202e")[0] in page.text
    assert "\u202e" not in html
    assert "\u2028" not in page.all("script", id="data-of-figures")[0].text


@each_row("kind", KINDS)
def test_plotly_is_given_no_markup(
    hostile: Mapping[str, Report], page_of: Page, parsed: Parsed, kind: str
) -> None:
    page = parsed(page_of(hostile[kind]))
    figures = json.loads(page.all("script", id="data-of-figures")[0].text)

    def texts(value: Any) -> list[str]:
        if isinstance(value, str):
            return [value]
        if isinstance(value, dict):
            inside = (one for name, one in value.items() if name != "hovertemplate")
            return [text for one in inside for text in texts(one)]
        return [text for one in value for text in texts(one)] if isinstance(value, list) else []

    found = [text.replace("<br>", "") for text in texts(figures)]
    assert any("&lt;img" in text for text in found)
    assert not any("<" in text for text in found)


@each_row("kind", KINDS)
def test_markdown_holds_no_markup_and_notifies_nobody(
    hostile: Mapping[str, Report], kind: str
) -> None:
    text = markdown(hostile[kind])
    for line in text.splitlines():
        bare = line.replace("<details><summary>", "").replace("</summary>", "")
        assert "<" not in bare.replace("</details>", "")
    assert "@all" not in text
    assert "\n# h" not in text


def test_a_file_that_is_named_with_markup_is_copied_as_it_is(page_of: Page, parsed: Parsed) -> None:
    section = launch_section(
        (File(path="launch/a/b", text=HOSTILE.replace("\u202e", ""), shown_bytes=9),),
        names=("launch/a/b",),
    )
    report = Report(
        title="t",
        kind="k",
        verdict="v",
        is_found=True,
        facts=_facts(),
        proof="p",
        sections=(section,),
    )
    (code,) = parsed(page_of(report)).all("code")
    assert code.text == HOSTILE.replace("\u202e", "")


def _facts() -> Any:
    from tuner.report.content import NamedValues

    return NamedValues(facts=(("x", Cell(text="1", value=1.0)),), are_large=True)
