"""How long planning took, as the user waited for it: from the call to the finished plan.

It holds reading, every search (also for what targets lack and for ways out), playing schedules and
comparing; not the start of the program, nor writing files.
"""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tuner.place_plan import PlacePlan
    from tuner.plan import Plan
    from tuner.serve_plan import ServePlan

AnyPlan = TypeVar("AnyPlan", "Plan", "ServePlan", "PlacePlan")


def timed(plan: AnyPlan, *, wall_s: float) -> AnyPlan:
    """Return the plan with the seconds that passed in its certificate."""
    certificate = plan.certificate.model_copy(update={"solve_s": max(0.0, wall_s)})
    return plan.model_copy(update={"certificate": certificate})
