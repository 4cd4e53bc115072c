"""The goals that there are: which table of functions a spec or a plan belongs to."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final

from tuner.errors import PlanUnreadableError
from tuner.paths import AnyPath, plan_folder
from tuner.plans.folder import PLAN_NAME, plan_kind, read_verified_as

if TYPE_CHECKING:
    from tuner.config.place import PlaceDecision
    from tuner.config.serve import ServeDecision
    from tuner.config.train import TrainDecision
    from tuner.goals.goal import Goal, StoredPlan
    from tuner.goals.place import ExplainedPlacePlan
    from tuner.goals.plan import AnyPlanned
    from tuner.goals.serve import ExplainedServePlan
    from tuner.goals.train import ExplainedPlan
    from tuner.verify.deployments.records import ServeVerified
    from tuner.verify.placement_records import PlaceVerified
    from tuner.verify.records import Verified

    Explained = ExplainedPlan | ExplainedServePlan | ExplainedPlacePlan
    AnyVerified = Verified | ServeVerified | PlaceVerified
    AnyGoal = Goal[
        StoredPlan,
        TrainDecision | ServeDecision | PlaceDecision,
        AnyPlanned,
        Explained,
        AnyVerified,
    ]
    """The goal of any plan, to whose functions go values of that plan alone."""

GOALS: Final[Mapping[str, str]] = {
    "train": "tuner.goals.train",
    "serve": "tuner.goals.serve",
    "place": "tuner.goals.place",
}
"""The module of each goal, with its `GOAL`; imported where it is needed, as each takes a second."""


def kind_or_first(kind: str | None) -> str:
    """Return the kind of a spec; the first there is for an unknown one, whose reader refuses it."""
    return kind if kind is not None and kind in GOALS else next(iter(GOALS))


def load_goal(kind: str) -> "AnyGoal":
    """Return the table of a goal.

    Raises:
        KeyError: there is no such goal.
    """
    goal: AnyGoal = import_module(GOALS[kind]).GOAL
    return goal


def goal_of(plan: "StoredPlan") -> "AnyGoal":
    """Return the goal of a plan."""
    return load_goal(plan.goal.kind)


def goal_of_folder(folder: AnyPath) -> "AnyGoal":
    """Return the goal of the plan of a folder.

    Raises:
        PlanUnreadableError: there is no plan, or it is of a goal that this version does not know.
    """
    folder = plan_folder(folder)
    kind = plan_kind(folder)
    if kind is None or kind not in GOALS:
        raise PlanUnreadableError(
            f"{folder / PLAN_NAME}: goal.kind {kind!r} is not one of {', '.join(GOALS)}, which this"
            " command reads"
        )
    return load_goal(kind)


def read_any_plan(folder: AnyPath) -> "StoredPlan":
    """Read the plan of a folder, whatever its goal.

    Raises:
        PlanUnreadableError: it is missing or damaged.
    """
    return goal_of_folder(folder).read(plan_folder(folder))


def read_verified(folder: AnyPath) -> "AnyVerified | None":
    """Read the trials of a plan's folder, whatever its goal; None where nothing was verified.

    Raises:
        PlanUnreadableError: they are damaged, or there is no plan.
    """
    return read_verified_as(goal_of_folder(folder).verified, plan_folder(folder))
