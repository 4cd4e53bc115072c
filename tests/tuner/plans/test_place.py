"""What a stored plan of a placement must agree with itself about."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from tuner.plans.place import PlacePlan

STORED = Path(__file__).parents[3] / "examples/checks/place-balance/plan.json"


def test_predictions_are_of_the_goals_workloads() -> None:
    plan = PlacePlan.model_validate_json(STORED.read_text(encoding="utf-8"))
    assert plan.predicted is not None
    name = next(iter(plan.predicted.imbalance))
    other = plan.predicted.model_copy(update={"imbalance": {"another": 1.0, name: 1.0}})
    changed = plan.model_copy(update={"predicted": other}).model_dump_json()
    with pytest.raises(ValidationError, match="'another' is no workload of the goal"):
        PlacePlan.model_validate_json(changed)
