"""The stored outputs of examples/worked are today's; `bash examples/worked/run.sh` renews them."""

import re
from pathlib import Path

import pytest

from tests.expect import present
from tests.rows import each_row
from tuner.costs.train.calibration import shipped
from tuner.estimate.estimate import estimate
from tuner.estimate.registry import read_launch
from tuner.goals.train_spec import read_spec

WORKED = Path(__file__).parents[2] / "examples" / "worked"
RECIPES = sorted(path.parent.name for path in WORKED.glob("*/public.sh"))


def stored_step_s(name: str, file: str) -> float:
    found = present(
        re.search(r"^step time +([\d.]+) s", (WORKED / name / file).read_text(), re.MULTILINE)
    )
    return float(found.group(1))


def test_every_public_recipe_is_there() -> None:
    assert len(RECIPES) == 3


@each_row("name", RECIPES)
def test_the_price_of_a_public_recipe_is_the_stored_one(name: str) -> None:
    spec = read_spec(WORKED / name / "spec.yaml")
    found = estimate(spec, read_launch(str(WORKED / name / "public.sh")), residuals=shipped())
    assert found.step_time_s == pytest.approx(stored_step_s(name, "estimate.txt"), rel=0.01)


@each_row("name", RECIPES)
def test_the_stored_plan_beats_the_stored_recipe(name: str) -> None:
    assert stored_step_s(name, "plan.txt") < stored_step_s(name, "estimate.txt")
