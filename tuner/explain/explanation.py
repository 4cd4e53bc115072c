"""`moetune explain` as a function: why this plan, why not the runners-up, what would change it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from profilers.errors import ProfilerError
from tuner.errors import TunerError
from tuner.explain.other_limits import what_ifs
from tuner.explain.outcomes import to_figures
from tuner.explain.planned_spec import StoredPlan, read_any_plan
from tuner.explain.rivals import to_rivals
from tuner.paths import AnyPath, plan_folder, to_paths
from tuner.plans.place import PlacePlan
from tuner.plans.serve import ServePlan
from tuner.plans.train import Plan
from tuner.plans.what_if import Change, Outcome, Why
from tuner.search.progress import ProgressListener, ignore_progress
from tuner.serve_kernels import kernels_changed

AGREE_RATIO: Final = 0.001
"""Relative difference of the objective up to which a re-solved plan counts as the same."""


class ExplainedPlan(Plan):
    """What `moetune explain --json` prints of a training plan: `plan.json` and why."""

    why: Why


class ExplainedServePlan(ServePlan):
    """The same of a deployment."""

    why: Why


class ExplainedPlacePlan(PlacePlan):
    """The same of a placement."""

    why: Why


Explained = ExplainedPlan | ExplainedServePlan | ExplainedPlacePlan


def explain(
    folder: AnyPath,
    *,
    changes: Sequence[Change] | None = None,
    profiles: AnyPath | Sequence[AnyPath] = (),
    time_limit_s: float = 60.0,
    calibrated: bool = True,
    watch: ProgressListener = ignore_progress,
) -> Explained:
    """Explain the plan of a folder.

    Args:
        folder: of the plan.
        changes: to solve for (tuner/plans/what_if.py); None: `usual_changes`, empty: none.
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
    requested = usual_changes(plan) if changes is None else tuple(changes)
    rivals = to_rivals(plan)
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
    notes = (*_other_kernels(plan, profiles), *_disagreement(plan, solved_changes.base))
    return _with_why(plan, Why(rivals=rivals, what_if=solved_changes, notes=notes))


def usual_changes(plan: StoredPlan) -> tuple[Change, ...]:
    """Return the default what-ifs of a plan: more nodes, less memory, faster links."""
    if isinstance(plan, PlacePlan):
        requested = [Change(key="nodes", value="+1"), Change(key="slots", value="+1")]
        requested += [Change(key="slots", value="-1")]
        if plan.cluster is not None:
            requested.append(Change(key="bandwidth", value="x2"))
        return tuple(requested)
    pools = plan.cluster.pools
    names = [pool.name for pool in pools] if len(pools) > 1 else [None]
    requested = [Change(key="nodes", pool=name, value="+1") for name in names]
    requested.append(Change(key="memory", value="-20%"))
    if not (isinstance(plan, Plan) and plan.provenance.device_kind):
        requested.append(Change(key="bandwidth", value="x2"))
    if isinstance(plan, Plan):
        if any(pool.nodes > 1 for pool in pools):
            requested.append(Change(key="nodes", value="x2"))
        requested.append(Change(key="batch", value="x2"))
    else:
        requested += _more_traffic(plan)
    return tuple(requested)


def _more_traffic(plan: ServePlan) -> list[Change]:
    if plan.goal.objective == "rate":
        return []  # It is as much as the devices serve.
    key = "concurrency" if plan.goal.traffic.is_closed_loop else "rate"
    return [Change(key=key, value="x2")]


def _with_why(plan: StoredPlan, why: Why) -> Explained:
    fields = dict(plan)
    if isinstance(plan, Plan):
        return ExplainedPlan(**fields, why=why)
    if isinstance(plan, ServePlan):
        return ExplainedServePlan(**fields, why=why)
    return ExplainedPlacePlan(**fields, why=why)


def _other_kernels(plan: StoredPlan, profiles: Sequence[Path]) -> tuple[str, ...]:
    if not isinstance(plan, ServePlan):
        return ()
    return kernels_changed(plan.provenance.kernels_sha256, plan.cluster, profiles)


def _disagreement(plan: StoredPlan, solved: Outcome) -> tuple[str, ...]:
    """Note a difference between the stored plan and the plan solved again."""
    stored = to_figures(plan)
    if (stored is None) != (not solved.figures):
        return (f"the plan says {plan.certificate.status}, solved again it is {solved.status}",)
    if stored is None:
        return ()
    before, after = stored.values[stored.objective], solved.figures.get(stored.objective, 0.0)
    if abs(after - before) <= AGREE_RATIO * abs(before):
        return ()
    return (
        f"solved again, {stored.objective} is {after:.6g}, the plan says {before:.6g}: another "
        "release, time limit, profile or --uncalibrated; what-ifs are compared with the former",
    )
