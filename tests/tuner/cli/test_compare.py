"""`moetune compare` as it is typed."""

import csv
from pathlib import Path

import pytest

from tests.expect import contains
from tests.tuner.cli.refusals import output
from tuner.cli.app import run
from tuner.explain.comparison import Comparison

CHECKS = Path(__file__).parents[3] / "examples" / "checks"
Captured = pytest.CaptureFixture[str]


def test_it_prints_differences_figures_and_the_verdict(capsys: Captured, tmp_path: Path) -> None:
    names = [str(CHECKS / name) for name in ("serve-mixed-pool", "serve-disaggregated")]
    out = tmp_path / "figures.csv"
    text = output(capsys, ["compare", *names, "--csv", out])
    assert f"the reference is {names[0]}: " in " ".join(text.split())
    contains(
        text,
        "\ndecision       with ",
        "\ntime           term by term: ",
        "\nbest by cost per hour: ",
    )
    assert "(equal, band " in output(capsys, ["compare", names[0], names[0]])
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert {row["plan"] for row in rows} == set(names)
    assert any(row["name"] == "cost_per_hour" and row["is_objective"] == "True" for row in rows)


def test_json_is_of_its_schema(capsys: Captured) -> None:
    names = [str(CHECKS / name) for name in ("train-mixtral", "train-qwen3")]
    assert (
        Comparison.model_validate_json(output(capsys, ["compare", *names, "--json"])).goal
        == "train"
    )


def test_two_goals_are_one_line_and_2(capsys: Captured) -> None:
    assert run(["compare", str(CHECKS / "train-qwen3"), str(CHECKS / "place-balance")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert "compare plans of one goal" in printed.err
