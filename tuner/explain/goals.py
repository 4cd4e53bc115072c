"""The goals that plans have: which table of functions a plan or a decision belongs to."""

from collections.abc import Mapping
from typing import Any, Final

from tuner.explain.goal import ExplainedGoal, StoredPlan
from tuner.explain.place import PLACE, ExplainedPlacePlan
from tuner.explain.serve import SERVE, ExplainedServePlan
from tuner.explain.train import TRAIN, ExplainedPlan
from tuner.goals.train_folder import plan_kind
from tuner.paths import AnyPath, plan_folder

Explained = ExplainedPlan | ExplainedServePlan | ExplainedPlacePlan

GOALS: Final[Mapping[str, ExplainedGoal]] = {one.kind: one for one in (TRAIN, SERVE, PLACE)}
"""By the kind of goal."""


def goal_of(value: Any) -> ExplainedGoal:
    """Return the goal of a plan or of a decision, by its type.

    Raises:
        ValueError: it is neither.
    """
    for goal in GOALS.values():
        if isinstance(value, (goal.plan_type, goal.decision_type)):
            return goal
    raise ValueError(f"{type(value).__name__} is of no goal")


def read_any_plan(folder: AnyPath) -> StoredPlan:
    """Read the plan of a folder, whatever its goal.

    Raises:
        PlanUnreadableError: it is missing or damaged.
    """
    folder = plan_folder(folder)
    goal = GOALS.get(plan_kind(folder) or TRAIN.kind, TRAIN)
    plan: StoredPlan = goal.read(folder)
    return plan


def words(decision: Any) -> str:
    """Name a decision in one cell."""
    return goal_of(decision).words(decision)


def differences(before: Any, after: Any) -> tuple[str, ...]:
    """Return the differences between two decisions of the same goal, e.g. `PP 2 -> 4`.

    Raises:
        ValueError: they are of two goals.
    """
    goal = goal_of(before)
    if goal is not goal_of(after):
        raise ValueError("decisions of two kinds have nothing in common")
    return goal.differences(before, after)
