"""Whole checks, with a planner that acts."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profilers.store import read_profile, write_header, write_table
from tuner.errors import TunerError
from tuner.regress.check import check
from tuner.regress.checks import Manner
from tuner.regress.records import Check, ScenarioResult, ScenarioVerdict

Run = Callable[..., Check]
PROFILE = Path(__file__).parents[3] / "examples/profiles/epyc-2-ranks/used/profile"


@pytest.fixture
def run(acting: Path) -> Run:
    """Check with the acting planner: run(folder, update=True) -> Check."""

    def check_it(folder: Path, **options: Any) -> Check:
        return check(folder, manner=Manner(tree=acting, workers=2), **options)

    return check_it


def verdicts(result: Check) -> dict[str, str]:
    return {one.name: one.verdict.value for one in result.scenarios}


def changed(folder: Path, old: str, new: str) -> None:
    file = folder / "spec.yaml"
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def test_every_verdict_is_given_where_it_belongs(checks: Path, run: Run) -> None:
    for name, ratio in {"better": 0.9, "drifts": 1.005, "worse": 1.1}.items():
        shutil.copytree(checks / "quick", checks / name)
        changed(checks / name, "step_ratio: 1.0", f"step_ratio: {ratio}")
    shutil.copytree(checks / "quick", checks / "asks")
    changed(checks / "asks", "size: 256", "size: 512")
    shutil.copytree(checks / "quick", checks / "crashes")
    changed(checks / "crashes", 'does: ""', "does: crash")
    shutil.copytree(checks / "quick", checks / "new")
    (checks / "new" / "plan.json").unlink()
    result = run(checks)
    assert verdicts(result) == {
        "asks": "incomparable",
        "better": "better",
        "crashes": "error",
        "drifts": "drift",
        "new": "missing",
        "quick": "pass",
        "worse": "regression",
    }
    assert result.failed
    reasons = {one.name: one.reason for one in result.scenarios}
    assert "goal.global_batch_size 256 -> 512" in reasons["asks"]
    assert "(+10.00 %)" in reasons["worse"]
    assert reasons["crashes"] == "planning crashed: ValueError: a defect"


def test_better_and_drift_do_not_fail(checks: Path, run: Run) -> None:
    changed(checks / "quick", "step_ratio: 1.0", "step_ratio: 0.9")
    assert not run(checks).failed


def test_an_update_writes_what_changed_and_no_more(checks: Path, run: Run) -> None:
    shutil.copytree(checks / "quick", checks / "larger")
    changed(checks / "larger", "size: 256", "size: 512")
    kept = (checks / "quick" / "plan.json").stat()
    accepted = run(checks, update=True)
    assert not accepted.failed
    assert accepted.updated == ("larger/baseline.json", "larger/plan.json", "scenarios.json")
    assert "accepted, was incomparable: " in accepted.scenarios[0].reason
    assert (checks / "quick" / "plan.json").stat() == kept
    assert verdicts(run(checks)) == {"larger": "pass", "quick": "pass"}
    assert run(checks, update=True).updated == ()


def test_a_removed_scenario_is_missing_until_it_is_dropped(checks: Path, run: Run) -> None:
    shutil.copytree(checks / "quick", checks / "other")
    run(checks, update=True)
    shutil.rmtree(checks / "other")
    result = run(checks)
    assert result.failed
    (gone,) = (one for one in result.scenarios if one.name == "other")
    assert gone.verdict is ScenarioVerdict.MISSING
    assert "the scenario is gone, and scenarios.json lists it" in gone.reason
    assert not run(checks, update=True).failed
    assert verdicts(run(checks)) == {"quick": "pass"}


def test_a_spec_that_cannot_be_read_is_an_error_of_its_own(checks: Path, run: Run) -> None:
    for name, text in (("flies", "goal: {kind: fly}\n"), ("no-yaml", "{"), ("empty", "")):
        (checks / name).mkdir()
        (checks / name / "spec.yaml").write_text(text)
    result = run(checks)
    assert verdicts(result) == {
        "empty": "error",
        "flies": "error",
        "no-yaml": "error",
        "quick": "pass",
    }
    assert "goal.kind 'fly'" in result.scenarios[1].reason


def test_an_unreadable_accepted_plan_can_be_accepted_anew(checks: Path, run: Run) -> None:
    (checks / "quick" / "plan.json").write_text('{"goal": {"kind": "train"}}')
    (result,) = run(checks).scenarios
    assert result.verdict is ScenarioVerdict.ERROR
    assert "accept a new one with --update" in result.reason
    run(checks, update=True)
    assert verdicts(run(checks)) == {"quick": "pass"}


def test_accepted_plans_of_another_folder_can_be_compared_with(
    checks: Path, run: Run, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(checks, tmp_path / "other"))
    shutil.copytree(checks / "quick", other / "former")
    shutil.copytree(checks / "quick", checks / "new")
    changed(checks / "quick", "step_ratio: 1.0", "step_ratio: 1.1")
    result = run(checks, against=str(other))
    assert result.against == str(other)
    assert verdicts(result) == {"former": "missing", "new": "incomparable", "quick": "regression"}
    reasons = [one.reason for one in result.scenarios]
    assert f"the scenario is gone, and {other} has it" in reasons[0]
    assert "has no such scenario" in reasons[1]


def test_another_version_plans_the_same_scenarios(
    checks: Path, run: Run, acting: Path, tmp_path: Path
) -> None:
    former = Path(shutil.copytree(acting, tmp_path / "former"))
    api = former / "tuner" / "api.py"
    api.write_text(api.read_text().replace("ratio = arguments", "ratio = 0.5 * arguments"))
    (checks / "quick" / "plan.json").unlink()
    (result,) = run(checks, against=str(former)).scenarios
    assert result.verdict is ScenarioVerdict.REGRESSION
    assert "(+100.00 %)" in result.reason
    (former / "tuner" / "api.py").write_text("")
    (result,) = run(checks, against=str(former)).scenarios
    assert result.verdict is ScenarioVerdict.INCOMPARABLE
    assert "cannot plan it" in result.reason


def test_a_single_scenario_needs_no_index(checks: Path, run: Run) -> None:
    (checks / "quick" / "plan.json").unlink()
    result = run(checks / "quick", update=True)
    assert verdicts(result) == {"quick": "pass"}
    assert result.updated == ("baseline.json", "plan.json")


def test_only_the_named_scenario_is_planned_and_the_index_is_kept(checks: Path, run: Run) -> None:
    shutil.copytree(checks / "quick", checks / "other")
    (checks / "other" / "plan.json").unlink()
    result = run(checks, only=("quick",), update=True)
    assert verdicts(result) == {"quick": "pass"}
    assert result.updated == ()
    with pytest.raises(TunerError, match="--only 'x' is no scenario"):
        run(checks, only=("x",))


def test_results_are_reported_as_they_come(checks: Path, run: Run) -> None:
    results: list[ScenarioResult] = []
    run(checks, on_result=results.append)
    assert [one.name for one in results] == ["quick"]


def test_a_slower_link_in_the_profile_is_named_with_its_operation(
    checks: Path, acting: Path
) -> None:
    profile = checks / "quick" / "profile"
    shutil.copytree(PROFILE, profile)
    # Accepted anew, with a summary of what was measured.
    (checks / "quick" / "plan.json").unlink()
    manner = Manner(tree=acting)
    assert not check(checks, update=True, manner=manner).failed

    stored = read_profile(profile)
    slower = [
        row.model_copy(update={"times_s": tuple(1.1 * time_s for time_s in row.times_s)})
        if row.case.kind == "all_reduce"
        else row
        for row in stored.measurements
        if row.case.operation == "collective"
    ]
    write_table(profile, slower, operation="collective")
    write_header(profile, stored.header)

    (result,) = check(checks, manner=manner).scenarios
    assert result.verdict is ScenarioVerdict.REGRESSION
    assert "collective all_reduce: 10 % slower over its 27 cases, significantly" in result.reason
