"""What a stored plan of a placement must agree with itself about."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from tuner.plans.folder import read_plan_as, write_plan_folder
from tuner.plans.place import PlacePlan

STORED = Path(__file__).parents[3] / "examples/checks/place-balance/plan.json"
PLAN = PlacePlan.model_validate_json(STORED.read_text(encoding="utf-8"))


def test_predictions_are_of_the_goals_workloads() -> None:
    assert PLAN.predicted is not None
    name = next(iter(PLAN.predicted.imbalance))
    outcome = PLAN.predicted.outcomes[0]
    for update, said in (
        ({"imbalance": {"another": 1.0, name: 1.0}}, "'another' is no workload of the goal"),
        ({"outcomes": ()}, "outcomes: not one for each workload"),
        ({"outcomes": (outcome, outcome)}, "outcomes: not one for each workload"),
        ({"traffic": {"total": (1.0, 1.0, 1.0), "peak": (1.0, 1.0, 1.0)}}, "more than one"),
    ):
        predicted = PLAN.predicted.model_copy(update=update)
        changed = PLAN.model_copy(update={"predicted": predicted}).model_dump_json()
        with pytest.raises(ValidationError, match=said):
            PlacePlan.model_validate_json(changed)


def test_a_folder_holds_whole_paths_so_that_it_can_be_read_from_anywhere(tmp_path: Path) -> None:
    write_plan_folder(tmp_path / "plan", PLAN, {})
    stored = read_plan_as(tmp_path / "plan", PlacePlan)
    for given, kept in zip(PLAN.goal.workloads, stored.goal.workloads, strict=True):
        assert (given.path.is_absolute(), kept.path) == (False, given.path.absolute())
