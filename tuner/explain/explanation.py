"""`moetune explain` as a function: why this plan, why not the runners-up, what would change it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from profilers.errors import ProfilerError
from tuner.errors import TunerError
from tuner.explain.other_limits import what_ifs
from tuner.goals.goal import StoredPlan
from tuner.goals.registry import goal_of, read_any_plan
from tuner.paths import AnyPath, plan_folder, to_paths
from tuner.plans.what_if import LimitChange, WhatIfOutcome, Why
from tuner.report.what_if import FIGURES
from tuner.search.progress import ProgressListener, ignore_progress

if TYPE_CHECKING:
    from tuner.goals.registry import Explained

AGREE_RATIO: Final = 0.001
"""Relative difference of the objective up to which a re-solved plan counts as the same."""


def explain(
    folder: AnyPath,
    *,
    changes: Sequence[LimitChange] | None = None,
    profiles: AnyPath | Sequence[AnyPath] = (),
    time_limit_s: float = 60.0,
    calibrated: bool = True,
    watch: ProgressListener = ignore_progress,
) -> "Explained":
    """Explain the plan of a folder.

    Args:
        folder: of the plan.
        changes: to solve for (tuner/plans/what_if.py); None: those of the goal, empty: none.
        profiles: as for `moetune plan`; a training plan holds its own.
        time_limit_s: for the searches of all changes together.
        calibrated: as the plan was made.
        watch: receives an event per change.

    Raises:
        PlanUnreadableError: there is no plan, or it does not hold what it was made from.
        SpecError: `changes` are named, and the plan's own spec can no longer be solved.
    """
    folder = plan_folder(folder)
    profiles = to_paths(profiles)
    plan = read_any_plan(folder)
    goal = goal_of(plan)
    requested = goal.usual_changes(plan) if changes is None else tuple(changes)
    rivals = goal.rivals(plan)
    if not requested:
        return _with_why(plan, Why(rivals=rivals))
    try:
        solved_changes = what_ifs(
            folder,
            requested,
            profiles=profiles,
            time_limit_s=time_limit_s,
            calibrated=calibrated,
            watch=watch,
        )
    except (TunerError, ProfilerError) as error:
        if changes is not None:
            raise
        # Without its inputs, what the plan itself holds can still be explained.
        note = f"nothing could be solved again: {' '.join(str(error).split())}"
        return _with_why(plan, Why(rivals=rivals, notes=(note,)))
    notes = (*goal.other_kernels(plan, profiles), *_disagreement(plan, solved_changes.base))
    return _with_why(plan, Why(rivals=rivals, what_if=solved_changes, notes=notes))


def _with_why(plan: StoredPlan, why: Why) -> "Explained":
    return goal_of(plan).explained.model_validate({**dict(plan), "why": why})


def _disagreement(plan: StoredPlan, solved: WhatIfOutcome) -> tuple[str, ...]:
    """Note a difference between the stored plan and the plan solved again."""
    stored = goal_of(plan).figures(plan)
    if (stored is None) != (not solved.figures):
        return (f"the plan says {plan.certificate.status}, solved again it is {solved.status}",)
    if stored is None:
        return ()
    before, after = stored.values[stored.objective], solved.figures.get(stored.objective, 0.0)
    if abs(after - before) <= AGREE_RATIO * abs(before):
        return ()
    name = FIGURES.get(stored.objective, stored.objective)
    return (
        f"solved again, {name} is {after:.6g}, the plan says {before:.6g}: another "
        "release, time limit, profile or --uncalibrated; what-ifs are compared with the former",
    )
