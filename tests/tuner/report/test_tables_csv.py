"""Tables as CSV: of a whole report, and of what a plan compares."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.cli.app import run
from tuner.goals.goal import StoredPlan
from tuner.goals.registry import goal_of_folder, read_any_plan
from tuner.plans.serve import FrontPoint, ServePlan
from tuner.report.content import Figure, Table
from tuner.report.front_figure import front_figure
from tuner.report.tables_csv import report_csv

CHECKS = Path(__file__).parents[3] / "examples" / "checks"
PLAIN = {"mode": "aggregated", "running": 4, "ttft_s": 0.1, "instance": "1 x 2 on h100 (TP 2)"}


def plan_csv(plan: StoredPlan) -> str:
    return plan.candidates().to_csv(index=False)


def _rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def _point(user: float, device: float, **more: Any) -> FrontPoint:
    fields: Mapping[str, Any] = {
        "tokens_per_s_per_user": user,
        "tokens_per_s_per_device": device,
        "within_targets": user >= 25.0,
        "on_joint_front": True,
    }
    return FrontPoint.model_validate({**PLAIN, **fields, **more})


def _with_front() -> ServePlan:
    plan = read_any_plan(CHECKS / "serve-mixed-pool")
    assert isinstance(plan, ServePlan)
    points = (_point(20.0, 900.0), _point(40.0, 500.0), _point(80.0, 100.0))
    return plan.model_copy(update={"pareto": points})


def test_every_cell_of_every_table_of_a_report_is_a_row() -> None:
    for name in ("train-mixtral", "serve-mixed-pool", "serve-infeasible", "place-balance"):
        report = goal_of_folder(CHECKS / name).report(CHECKS / name)
        tables = [
            block.table if isinstance(block, Figure) else block
            for section in report.sections
            for block in section.blocks
            if isinstance(block, Table | Figure)
        ]
        cells = sum(len(row) for table in tables for row in table.rows)
        rows = _rows(report_csv(report))
        assert sum(row["table"] != "facts" for row in rows) == cells
        exact = [row for row in rows if row["value"]]
        assert all(float(row["value"]) is not None for row in exact)
        assert exact or name == "serve-infeasible"


def test_a_plan_of_any_goal_has_a_table() -> None:
    assert len(_rows(plan_csv(_with_front()))) == 3
    assert _rows(plan_csv(_with_front()))[1]["tokens_per_s_per_user"] == "40.0"
    train = _rows(plan_csv(read_any_plan(CHECKS / "train-mixtral")))
    assert train[0]["kind"] == "plan"
    assert {row["kind"] for row in train} >= {"plan", "alternative"}
    assert len(_rows(plan_csv(read_any_plan(CHECKS / "place-balance")))) == 3
    assert _rows(plan_csv(read_any_plan(CHECKS / "train-infeasible"))) == []


def test_the_front_is_drawn_with_the_region_that_keeps_the_target() -> None:
    plan = _with_front()
    figure = front_figure(plan)
    assert figure is not None
    line, region = figure.layout["shapes"]
    assert (
        line["x0"]
        == region["x0"]
        == 1.0 / 0.04
        < region["x1"]
        == figure.layout["xaxis"]["range"][1]
    )
    front, star = figure.traces
    assert list(front["x"]) == [20.0, 40.0, 80.0]
    assert [symbol.endswith("-open") for symbol in front["marker"]["symbol"]] == [
        True,
        False,
        False,
    ]
    assert plan.predicted is not None
    assert star["x"] == [1.0 / plan.predicted.tpot_s.mean]
    assert len(figure.table.rows) == 3
    assert front_figure(plan.model_copy(update={"pareto": ()})) is None


def test_plan_and_report_write_the_files(tmp_path: Path) -> None:
    spec = CHECKS.parent / "placement" / "balance.yaml"
    out, table, page = tmp_path / "plan", tmp_path / "table.csv", tmp_path / "page.csv"
    planning = ["plan", str(spec), "-o", str(out), "--time-limit", "2s", "--csv", str(table)]
    assert run(planning) == 0
    assert len(_rows(table.read_text())) == 3
    made = ["report", str(out), "--no-what-if", "--format", "csv", "-o", str(page)]
    assert run(made) == 0
    assert _rows(page.read_text())[0]["section"] == "headline"
