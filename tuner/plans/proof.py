"""Statements of what a certificate proves, and of the wall time of planning.

That time includes reading, every search (also for unlaunchable features and relaxations),
simulation and comparison; not the start of the program, nor writing files.
"""

import math
from typing import TYPE_CHECKING, TypeVar

from tuner.plans.train import Certificate
from tuner.units import format_ratio

if TYPE_CHECKING:
    from tuner.plans.place import PlacePlan
    from tuner.plans.serve import ServePlan
    from tuner.plans.train import Plan

Proven = TypeVar("Proven", "Plan", "ServePlan", "PlacePlan")


def certificate_line(certificate: Certificate) -> str:
    """Say in one line what is proven."""
    space = certificate.space
    counted = (
        f"{space.priced:,} priced, {space.bounded:,} proven worse by their bounds, "
        f"{space.illegal:,} illegal"
    )
    if space.open:
        counted += f", {space.open:,} neither solved nor ruled out"
    proven = proof_words(certificate)
    if certificate.decision_gap_ratio is not None:
        proven = (
            f"the fastest found is {proven}, the decision itself within "
            f"{gap_words(certificate.decision_gap_ratio)}"
        )
    return f"{proven} ({counted})"


def gap_words(gap_ratio: float) -> str:
    """Say how far above the bound an objective is, rounded up, so that it is within what is said.

    Args:
        gap_ratio: share of the objective, as solvers state it; people read a share of the optimum.
    """
    if gap_ratio >= 1.0:
        return "an unknown distance"
    above = gap_ratio / (1.0 - gap_ratio)
    return format_ratio(math.ceil(1000.0 * above - 1e-6) / 1000.0)


def proof_words(certificate: Certificate) -> str:
    """Say what is proven of the fastest decision, or of there being none."""
    if certificate.status == "optimal":
        return "proven optimal under the model"
    if certificate.status == "feasible":
        return f"within {gap_words(certificate.gap_ratio)} of optimal under the model"
    if certificate.status == "unknown":
        return "unknown: nothing was found, and not everything was ruled out"
    return certificate.status


def with_planning_time(plan: Proven, *, wall_s: float) -> Proven:
    """Return the plan with the planning time, from the call to the finished plan, stated."""
    certificate = plan.certificate.model_copy(update={"solve_s": max(0.0, wall_s)})
    return plan.model_copy(update={"certificate": certificate})
