"""Wall time of planning: from the call to the finished plan.

It includes reading, every search (also for unlaunchable features and relaxations), simulation and
comparison; not the start of the program, nor writing files.
"""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tuner.plans.place import PlacePlan
    from tuner.plans.serve import ServePlan
    from tuner.plans.train import Plan

AnyPlan = TypeVar("AnyPlan", "Plan", "ServePlan", "PlacePlan")


def with_planning_time(plan: AnyPlan, *, wall_s: float) -> AnyPlan:
    """Return the plan with the planning time in its certificate."""
    certificate = plan.certificate.model_copy(update={"solve_s": max(0.0, wall_s)})
    return plan.model_copy(update={"certificate": certificate})
