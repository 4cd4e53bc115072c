"""`moetune report` as it is typed."""

import json
from pathlib import Path

import pytest

from tests.expect import contains, present
from tests.tuner.cli.refusals import Captured, output, refusal
from tuner.cli import app as frame
from tuner.explain import report as report_api
from tuner.goals.train_folder import read_plan
from tuner.report.written import Written


def test_the_page_lies_beside_the_plan_unless_another_place_is_named(
    planned: Path, tmp_path: Path, capsys: Captured
) -> None:
    page = planned / "report.html"
    assert output(capsys, ["report", planned, "--no-what-if"]) == f"written: {page}\n"
    other = tmp_path / "deep" / "page.html"
    told = output(capsys, ["report", planned, "--no-what-if", "--json", "-o", other])
    written = Written.model_validate_json(told)
    assert other.read_bytes() == page.read_bytes()
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert written.bytes == page.stat().st_size
    assert written.found
    assert {"breakdown", "timeline", "candidates"} <= set(written.figures)
    assert "what-if" not in written.sections


def test_markdown_names_decision_and_price_and_solves_what_ifs_anew(planned: Path) -> None:
    assert frame.run(["report", str(planned), "--format", "md", "--time-limit", "4s"]) == 0
    text, plan = (planned / "report.md").read_text(encoding="utf-8"), read_plan(planned)
    assert f"micro-batch {present(plan.decision).micro_batch_size}" in text
    assert plan.binding_constraint.split(":")[0].replace("_", "\\_") in text
    assert "### What if" in text
    contains(text, "4.00 s for their searches", "as planned")


def test_a_picture_without_a_browser_is_a_missing_piece(
    planned: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert frame.run(["report", str(planned), "--no-what-if", "--format", "png"]) == 3
    assert "apt-get install chromium" in capsys.readouterr().err
    assert not (planned / "report.png").exists()


def test_a_folder_without_a_plan_is_unusable_input(tmp_path: Path, capsys: Captured) -> None:
    assert "holds no plan.json" in refusal(capsys, ["report", tmp_path, "--no-what-if"])


def test_a_damaged_verification_is_named(planned: Path, capsys: Captured) -> None:
    (planned / "verified.json").write_text("{", encoding="utf-8")
    assert "verified.json" in refusal(capsys, ["report", planned, "--no-what-if"])


def test_a_plan_that_found_nothing_is_a_negative_result_and_nothing_is_solved_for_it(
    planned: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = json.loads((planned / "plan.json").read_text(encoding="utf-8"))
    plan |= {"decision": None, "predicted": None, "alternatives": [], "preferred": None}
    plan["certificate"] |= {"status": "infeasible", "objective": None, "bound": None}
    (planned / "plan.json").write_text(json.dumps(plan), encoding="utf-8")

    def solves(*_: object, **__: object) -> None:
        raise AssertionError("solved a question whose answer is thrown away")

    monkeypatch.setattr(report_api, "what_ifs", solves)
    told = output(capsys, ["report", planned, "--json"], code=1)
    assert not Written.model_validate_json(told).found


def test_a_question_that_cannot_be_asked_again_names_the_way_without(
    planned: Path, capsys: Captured
) -> None:
    (planned / "used" / "spec.yaml").unlink()
    said = refusal(capsys, ["report", planned])
    assert said.endswith("--no-what-if reports on what is stored")
    assert frame.run(["report", str(planned), "--no-what-if"]) == 0
