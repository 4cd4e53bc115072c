import json
from pathlib import Path

import pytest

from tests.rows import each_row
from tuner.regress.observed import plan_facts, spec_differences
from tuner.regress.records import ScenarioVerdict
from tuner.regress.rules import Tolerance, judge

FIXTURES = Path(__file__).parent / "fixtures"


@each_row("kind", ["train", "serve", "place"])
def test_every_kind_of_plan_has_figures_and_equals_itself(kind: str) -> None:
    seen = plan_facts(json.loads((FIXTURES / f"plan-1-{kind}.json").read_text()))
    assert seen.kind == kind
    assert seen.has_decision
    assert len(seen.figures) >= 2
    assert judge(seen, seen, tolerance=Tolerance()).verdict is ScenarioVerdict.PASS


def test_goodput_is_better_high() -> None:
    plan = json.loads((FIXTURES / "plan-1-serve.json").read_text())
    lower = json.loads(json.dumps(plan))
    lower["predicted"]["goodput_per_device"] *= 0.9
    result = judge(plan_facts(plan), plan_facts(lower), tolerance=Tolerance())
    assert result.verdict is ScenarioVerdict.REGRESSION
    assert "goodput per device" in result.reason
    assert (
        judge(plan_facts(lower), plan_facts(plan), tolerance=Tolerance()).verdict
        is ScenarioVerdict.BETTER
    )


def test_slots_that_hold_another_expert_are_counted() -> None:
    plan = json.loads((FIXTURES / "plan-1-place.json").read_text())
    other = json.loads(json.dumps(plan))
    row = other["decision"]["physical_to_logical"][0]
    row[0], row[1] = row[1], row[0]
    result = judge(plan_facts(plan), plan_facts(other), tolerance=Tolerance())
    assert result.verdict is ScenarioVerdict.DRIFT
    assert "2 of " in result.reason


def test_a_placement_that_is_no_longer_worth_it_is_a_regression() -> None:
    plan = json.loads((FIXTURES / "plan-1-place.json").read_text())
    worth = {**plan, "verdict": {"word": "worth it"}}
    fragile = {**plan, "verdict": {"word": "fragile"}}
    result = judge(plan_facts(worth), plan_facts(fragile), tolerance=Tolerance())
    assert result.verdict is ScenarioVerdict.REGRESSION
    assert "'worth it', now 'fragile'" in result.reason


def test_a_plan_without_what_every_version_wrote_is_refused() -> None:
    with pytest.raises(KeyError):
        plan_facts({"goal": {"kind": "train"}})


def test_paths_are_no_part_of_the_spec() -> None:
    here = {"goal": {"routing": {"path": "/here/a.json", "phase": "steady"}}}
    there = {"goal": {"routing": {"path": "/there/a.json", "phase": "early"}}}
    assert list(spec_differences(here, there)) == [("goal.routing.phase", "steady", "early")]


def test_the_most_requests_are_better_high_and_bounded_from_above() -> None:
    plan = json.loads((FIXTURES / "plan-1-serve.json").read_text())
    plan["goal"] |= {"objective": "rate"}
    plan["goal"]["traffic"] |= {"rate": 100.0, "concurrency": None}
    plan["certificate"] |= {"objective": 100.0, "bound": 110.0, "status": "feasible"}
    fewer = json.loads(json.dumps(plan))
    # A plan stores the rate that it serves as its traffic's, which is no change of the spec.
    fewer["goal"]["traffic"]["rate"] = 80.0
    fewer["certificate"]["objective"] = 80.0
    assert (
        judge(plan_facts(plan), plan_facts(plan), tolerance=Tolerance()).verdict
        is ScenarioVerdict.PASS
    )
    worse = judge(plan_facts(plan), plan_facts(fewer), tolerance=Tolerance())
    assert worse.verdict is ScenarioVerdict.REGRESSION
    assert (
        judge(plan_facts(fewer), plan_facts(plan), tolerance=Tolerance()).verdict
        is ScenarioVerdict.BETTER
    )
    beyond = json.loads(json.dumps(plan))
    beyond["certificate"]["bound"] = 90.0
    broken = judge(plan_facts(plan), plan_facts(beyond), tolerance=Tolerance())
    assert "the solver's bound is broken" in broken.reason
