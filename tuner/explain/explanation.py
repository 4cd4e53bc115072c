"""`moetune explain` as a function: why this plan, why not the next, what would change it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from profilers.errors import ProfilerError
from tuner.errors import TunerError
from tuner.explain.other_limits import what_ifs
from tuner.explain.outcomes import figures_of
from tuner.explain.planned_spec import StoredPlan, read_any_plan
from tuner.explain.rivals import rivals_of
from tuner.paths import AnyPath, paths_of, plan_folder
from tuner.place_plan import PlacePlan
from tuner.plan import Plan
from tuner.planner.progress import Watch, unwatched
from tuner.serve_kernels import kernels_changed
from tuner.serve_plan import ServePlan
from tuner.what_if import Change, Outcome, Why

AGREE_RATIO: Final = 0.001
"""Of the objective by which a plan that is solved again may differ and still be the same."""


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
    watch: Watch = unwatched,
) -> Explained:
    """Explain the plan of a folder.

    Args:
        folder: of the plan.
        changes: to solve for, see `tuner.what_if`; None: those of `usual_changes`, empty: none.
        profiles: as for `moetune plan`; a training plan holds its own.
        time_limit_s: for the searches of all changes together.
        calibrated: as the plan was made.
        watch: told which change is being solved.

    Raises:
        PlanUnreadableError: there is no plan, or it does not hold what it was made from.
        SpecError: `changes` are named, and the plan's own question can no longer be asked.
    """
    folder = plan_folder(folder)
    profiles = paths_of(profiles)
    plan = read_any_plan(folder)
    asked = usual_changes(plan) if changes is None else tuple(changes)
    rivals = rivals_of(plan)
    if not asked:
        return _explained(plan, Why(rivals=rivals))
    try:
        found = what_ifs(
            folder,
            asked,
            profiles=profiles,
            time_limit_s=time_limit_s,
            calibrated=calibrated,
            watch=watch,
        )
    except (TunerError, ProfilerError) as error:
        if changes is not None:
            raise
        # What the plan itself holds can be explained without what it was made from.
        note = f"nothing could be solved again: {' '.join(str(error).split())}"
        return _explained(plan, Why(rivals=rivals, notes=(note,)))
    notes = (*_other_kernels(plan, profiles), *_disagreement(plan, found.base))
    return _explained(plan, Why(rivals=rivals, what_if=found, notes=notes))


def usual_changes(plan: StoredPlan) -> tuple[Change, ...]:
    """Return what is asked of every plan: more machines, less memory, faster links."""
    if isinstance(plan, PlacePlan):
        asked = [Change(key="nodes", value="+1"), Change(key="slots", value="+1")]
        asked += [Change(key="slots", value="-1")]
        if plan.cluster is not None:
            asked.append(Change(key="bandwidth", value="x2"))
        return tuple(asked)
    pools = plan.cluster.pools
    names = [pool.name for pool in pools] if len(pools) > 1 else [None]
    asked = [Change(key="nodes", pool=name, value="+1") for name in names]
    asked.append(Change(key="memory", value="-20%"))
    if not (isinstance(plan, Plan) and plan.provenance.device_kind):
        asked.append(Change(key="bandwidth", value="x2"))
    if isinstance(plan, Plan):
        if any(pool.nodes > 1 for pool in pools):
            asked.append(Change(key="nodes", value="x2"))
        asked.append(Change(key="batch", value="x2"))
    else:
        asked += _more_traffic(plan)
    return tuple(asked)


def _more_traffic(plan: ServePlan) -> list[Change]:
    if plan.goal.objective == "rate":
        return []  # It is as much as the devices serve.
    key = "concurrency" if plan.goal.traffic.is_closed_loop else "rate"
    return [Change(key=key, value="x2")]


def _explained(plan: StoredPlan, why: Why) -> Explained:
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


def _disagreement(plan: StoredPlan, again: Outcome) -> tuple[str, ...]:
    """Say where solving the plan's own question again gives another answer than is stored."""
    stored = figures_of(plan)
    if (stored is None) != (not again.figures):
        return (f"the plan says {plan.certificate.status}, solved again it is {again.status}",)
    if stored is None:
        return ()
    before, after = stored.values[stored.objective], again.figures.get(stored.objective, 0.0)
    if abs(after - before) <= AGREE_RATIO * abs(before):
        return ()
    return (
        f"solved again, {stored.objective} is {after:.6g}, the plan says {before:.6g}: another "
        "release, time limit, profile or --uncalibrated; the answers are compared with the former",
    )
