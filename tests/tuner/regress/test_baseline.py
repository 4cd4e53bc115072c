"""Stored files of every released schema version stay readable; the fixtures are never renewed."""

import json
import shutil
from pathlib import Path

import pytest

from profilers.errors import ProfileUnreadableError
from profilers.store import read_profile
from tests.expect import present, refused
from tests.rows import each_row
from tuner.errors import PlanUnreadableError
from tuner.goals.registry import GOALS, load_goal
from tuner.goals.train_folder import read_plan
from tuner.regress.baseline import (
    Baseline,
    baseline_json,
    plan_json,
    pruned,
    read_accepted,
    read_baseline,
)
from tuner.regress.measurements import sum_up
from tuner.regress.observed import plan_facts

FIXTURES = Path(__file__).parent / "fixtures"
VERSIONS = {"plan": (1,), "profile": (1,)}
"""Every schema version that a release wrote."""


@each_row("kind", GOALS)
@each_row("version", VERSIONS["plan"])
def test_plans_of_every_released_schema_are_read(kind: str, version: int) -> None:
    values = present(read_accepted(FIXTURES / f"plan-{version}-{kind}.json"))
    assert plan_facts(values).kind == kind
    assert (
        max(VERSIONS["plan"]) == load_goal(kind).plan_type.model_fields["schema_version"].default
    ), "keep a fixture of the new schema version"


@each_row("version", VERSIONS["profile"])
def test_profiles_of_every_released_schema_are_read(version: int) -> None:
    profile = read_profile(FIXTURES / f"profile-{version}")
    assert {row.case.operation for row in profile.measurements} == {"copy", "storage"}


def test_a_newer_profile_is_refused_with_the_version_that_is_needed(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "profile-1", tmp_path / "profile"))
    header = json.loads((folder / "profile.json").read_text())
    header |= {"schema_version": 2, "moetune_version": "0.8.0", "new": "field"}
    (folder / "profile.json").write_text(json.dumps(header))
    with pytest.raises(ProfileUnreadableError, match=r"needed is moetune 0\.8\.0, which wrote it"):
        read_profile(folder)


def test_a_newer_plan_is_refused_with_the_version_that_is_needed(tmp_path: Path) -> None:
    values = json.loads((FIXTURES / "plan-1-train.json").read_text())
    values["schema_version"] = 2
    values["provenance"]["moetune_version"] = "0.7.0"
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(values))
    with refused(
        PlanUnreadableError, "moetune 0.7.0", match=r"schema_version 2 is not 1, .*; needed is"
    ):
        read_accepted(file)
    with pytest.raises(PlanUnreadableError, match=r"needed is moetune 0\.7\.0"):
        read_plan(tmp_path)


@each_row(
    ("change", "words"),
    [
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"emit": None}, "emit: "),
    ],
)
def test_a_schema_that_changed_without_a_version_is_noticed(
    change: dict[str, object], words: str, tmp_path: Path
) -> None:
    values = json.loads((FIXTURES / "plan-1-train.json").read_text())
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(values | change))
    with refused(PlanUnreadableError, "the schema of plans changed", match=words):
        read_accepted(file)


@each_row("number", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_refused_as_nothing_compares_with_it(
    number: str, tmp_path: Path
) -> None:
    values = json.loads((FIXTURES / "plan-1-train.json").read_text())
    values["predicted"]["step_time_s"] = float(number)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(values))
    with pytest.raises(PlanUnreadableError, match="NaN or Infinity"):
        read_accepted(file)


def test_a_plan_of_no_known_goal_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text('{"goal": {"kind": "fly"}}')
    with pytest.raises(PlanUnreadableError, match="'fly'"):
        read_accepted(file)


def test_no_file_is_no_plan_and_no_baseline(tmp_path: Path) -> None:
    assert read_accepted(tmp_path / "plan.json") is None
    assert read_baseline(tmp_path / "baseline.json") is None


@each_row("kind", GOALS)
def test_a_pruned_plan_is_small_and_still_a_plan(kind: str, tmp_path: Path) -> None:
    values = json.loads((FIXTURES / f"plan-1-{kind}.json").read_text())
    file = tmp_path / "plan.json"
    file.write_text(plan_json(values))
    again = present(read_accepted(file))
    assert again == json.loads(json.dumps(pruned(values)))
    assert again["decision"] == values["decision"]
    assert again["predicted"] == values["predicted"]
    assert file.stat().st_size < 50_000


def test_a_baseline_is_read_back(tmp_path: Path) -> None:
    baseline = Baseline(
        moetune_version="0.1.0",
        profiles={"profile": sum_up(FIXTURES / "profile-1")},
    )
    file = tmp_path / "baseline.json"
    file.write_text(baseline_json(baseline))
    assert read_baseline(file) == baseline
    # That of an older release, which timed planning, is the same.
    older = json.loads(file.read_text()) | {"effort": {"cpu_s": 1.0}}
    (tmp_path / "older.json").write_text(json.dumps(older))
    known = present(read_baseline(tmp_path / "older.json"))
    assert baseline_json(known) == baseline_json(baseline)
    # One line for each kind of operation, so that a diff shows which one was measured anew.
    assert sum("copy/" in line for line in file.read_text().splitlines()) == 1


def test_a_damaged_or_newer_baseline_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    file.write_text('{"schema_version": 1}')
    with pytest.raises(PlanUnreadableError, match="moetune_version: Field required; write it anew"):
        read_baseline(file)
    file.write_text('{"schema_version": 2, "moetune_version": "0.9.0"}')
    with pytest.raises(PlanUnreadableError, match=r"needed is moetune 0\.9\.0"):
        read_baseline(file)
