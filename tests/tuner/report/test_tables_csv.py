"""Tables of what a plan compares, as CSV, and its front as a figure."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.expect import present
from tuner.cli.app import run
from tuner.goals.goal import StoredPlan
from tuner.goals.registry import read_any_plan
from tuner.plans.serve import FrontPoint, ServePlan
from tuner.report.serve_choice import front_figure

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
    figure = present(front_figure(plan))
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
    assert star["x"] == [1.0 / present(plan.predicted).tpot_s.mean]
    assert len(figure.table.rows) == 3
    assert front_figure(plan.model_copy(update={"pareto": ()})) is None


def test_plan_writes_its_table(tmp_path: Path) -> None:
    spec = CHECKS.parent / "placement" / "balance.yaml"
    out, table = tmp_path / "plan", tmp_path / "table.csv"
    planning = ["plan", str(spec), "-o", str(out), "--time-limit", "2s", "--csv", str(table)]
    assert run(planning) == 0
    assert len(_rows(table.read_text())) == 3
