import json
from pathlib import Path

import pytest

from tests.rows import each_row
from tuner.regress.observed import observed, question_changes
from tuner.regress.records import Verdict
from tuner.regress.rules import Tolerance, judge

FIXTURES = Path(__file__).parent / "fixtures"


@each_row("kind", ["train", "serve", "place"])
def test_every_kind_of_plan_has_figures_and_equals_itself(kind: str) -> None:
    plan = json.loads((FIXTURES / f"plan-1-{kind}.json").read_text())
    seen = observed(plan)
    assert seen.kind == kind
    assert seen.is_found
    assert len(seen.figures) >= 2
    assert judge(seen, seen, tolerance=Tolerance()).verdict is Verdict.PASS


def test_goodput_is_better_high() -> None:
    plan = json.loads((FIXTURES / "plan-1-serve.json").read_text())
    lower = json.loads(json.dumps(plan))
    lower["predicted"]["goodput_per_device"] *= 0.9
    found = judge(observed(plan), observed(lower), tolerance=Tolerance())
    assert found.verdict is Verdict.REGRESSION
    assert "goodput per device" in found.reason
    assert judge(observed(lower), observed(plan), tolerance=Tolerance()).verdict is Verdict.BETTER


def test_slots_that_hold_another_expert_are_counted() -> None:
    plan = json.loads((FIXTURES / "plan-1-place.json").read_text())
    other = json.loads(json.dumps(plan))
    row = other["decision"]["physical_to_logical"][0]
    row[0], row[1] = row[1], row[0]
    found = judge(observed(plan), observed(other), tolerance=Tolerance())
    assert found.verdict is Verdict.DRIFT
    assert "2 of " in found.reason


def test_a_placement_that_is_no_longer_worth_it_is_a_regression() -> None:
    plan = json.loads((FIXTURES / "plan-1-place.json").read_text())
    worth = {**plan, "verdict": {"word": "worth it"}}
    fragile = {**plan, "verdict": {"word": "fragile"}}
    found = judge(observed(worth), observed(fragile), tolerance=Tolerance())
    assert found.verdict is Verdict.REGRESSION
    assert "'worth it', now 'fragile'" in found.reason


def test_a_plan_without_what_every_version_wrote_is_refused() -> None:
    with pytest.raises(KeyError):
        observed({"goal": {"kind": "train"}})


def test_paths_are_no_part_of_the_question() -> None:
    here = {"goal": {"routing": {"path": "/here/a.json", "phase": "steady"}}}
    there = {"goal": {"routing": {"path": "/there/a.json", "phase": "early"}}}
    assert list(question_changes(here, there)) == [("goal.routing.phase", "steady", "early")]


def test_the_most_requests_are_better_high_and_bounded_from_above() -> None:
    plan = json.loads((FIXTURES / "plan-1-serve.json").read_text())
    plan["goal"] |= {"objective": "rate"}
    plan["goal"]["traffic"] |= {"rate": 100.0, "concurrency": None}
    plan["certificate"] |= {"objective": 100.0, "bound": 110.0, "status": "feasible"}
    fewer = json.loads(json.dumps(plan))
    # A plan states the rate that it serves as its traffic's, which is no other question.
    fewer["goal"]["traffic"]["rate"] = 80.0
    fewer["certificate"]["objective"] = 80.0
    assert judge(observed(plan), observed(plan), tolerance=Tolerance()).verdict is Verdict.PASS
    worse = judge(observed(plan), observed(fewer), tolerance=Tolerance())
    assert worse.verdict is Verdict.REGRESSION
    assert judge(observed(fewer), observed(plan), tolerance=Tolerance()).verdict is Verdict.BETTER
    beyond = json.loads(json.dumps(plan))
    beyond["certificate"]["bound"] = 90.0
    broken = judge(observed(plan), observed(beyond), tolerance=Tolerance())
    assert "the solver's bound is broken" in broken.reason
