"""What-ifs: the plan under other limits, each solved again.

The spec is read from the plan's folder (planned_spec.py), one limit is changed (changes.py), and
the planner of `moetune plan` solves it. The unchanged spec is solved again in the same way, so that
what-ifs are compared with it and not with a plan that was made with more time, by another release
or from other tables.

All what-ifs share one time limit; each gets an equal part of what is left. As in a plan, the limit
is for searching and pricing comes on top, so the whole takes longer on large clusters. A change
whose turn comes after the limit is reported as out of time.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import yaml

from profilers.errors import ProfilerError
from solvers.errors import SolverError
from tuner.errors import TunerError
from tuner.explain.changes import apply_change
from tuner.explain.outcomes import to_outcome
from tuner.goals.goal import PlannedSpec, StoredPlan
from tuner.goals.plan import plan as plan_spec
from tuner.goals.planned_spec import read_planned_spec
from tuner.goals.registry import goal_of, read_any_plan
from tuner.paths import AnyPath, plan_folder, to_paths
from tuner.plans.what_if import IDLE, LimitChange, WhatIf, WhatIfOutcome
from tuner.search.progress import PlanningEvent, ProgressListener, ignore_progress
from tuner.spec.files import shown_path
from tuner.spec.spec_file import Keys

AS_PLANNED: Final = "as planned"
LEAST_S: Final = 1.0
"""Minimum search time of one what-if."""

PlanKeys = Callable[[Keys, float], StoredPlan]


def what_if(
    folder: AnyPath,
    change: LimitChange,
    *,
    profiles: AnyPath | Sequence[AnyPath] = (),
    time_limit_s: float = 20.0,
    calibrated: bool = True,
) -> WhatIfOutcome:
    """Return the plan of a folder after one change; see `what_ifs`."""
    folder = plan_folder(folder)
    profiles = to_paths(profiles)
    solved = what_ifs(
        folder, (change,), profiles=profiles, time_limit_s=time_limit_s, calibrated=calibrated
    )
    return solved.outcomes[0]


def what_ifs(
    folder: AnyPath,
    changes: Sequence[LimitChange],
    *,
    profiles: AnyPath | Sequence[AnyPath] = (),
    time_limit_s: float = 60.0,
    calibrated: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    watch: ProgressListener = ignore_progress,
) -> WhatIf:
    """Solve the spec of a plan again, unchanged and after each change.

    A change that the spec or the planner refuses is an outcome with the reason.

    Args:
        folder: of the plan.
        changes: each applied by itself.
        profiles: as for `moetune plan`; a training plan holds its own.
        time_limit_s: of all searches together.
        calibrated: as the plan was made.
        clock: for the limit and the reported times.
        watch: receives an event per change.

    Raises:
        PlanUnreadableError: the folder holds no plan, or not the spec that it was made from.
        SpecError: the plan's own spec can no longer be solved; the message says what is missing.
    """
    folder = plan_folder(folder)
    profiles = to_paths(profiles)
    plan = read_any_plan(folder)
    spec = read_planned_spec(folder, plan, goal_of(plan).spec)
    end_s = clock() + time_limit_s

    def plan_keys(keys: Keys, limit_s: float) -> StoredPlan:
        return _plan_keys(
            spec, keys, profiles=profiles, time_limit_s=limit_s, calibrated=calibrated
        )

    watch(PlanningEvent(stage="solving", text=f"{AS_PLANNED}, then {len(changes)} changes"))
    base = plan_keys(spec.keys, max(LEAST_S, time_limit_s / (1 + len(changes))))
    outcomes = []
    for number, change in enumerate(changes):
        left_s = end_s - clock()
        if left_s < LEAST_S and number:
            outcomes.append(_out_of_time(change, time_limit_s))
            continue
        watch(PlanningEvent(stage="solving", text=f"{change}, {number + 1} of {len(changes)}"))
        share_s = max(LEAST_S, left_s / (len(changes) - number))
        outcomes.append(_solve_change(spec, change, base, plan_keys, share_s=share_s, clock=clock))
    return WhatIf(
        base=to_outcome(
            base, change="", says=AS_PLANNED, base=None, solve_s=base.certificate.solve_s
        ),
        outcomes=tuple(outcomes),
        time_limit_s=time_limit_s,
    )


def _out_of_time(change: LimitChange, time_limit_s: float) -> WhatIfOutcome:
    return WhatIfOutcome(
        change=str(change),
        says="",
        status="out_of_time",
        reason=f"the {time_limit_s:g} s for all cases were used up; raise --time-limit",
    )


def _solve_change(
    spec: PlannedSpec,
    change: LimitChange,
    base: StoredPlan,
    plan_keys: PlanKeys,
    *,
    share_s: float,
    clock: Callable[[], float],
) -> WhatIfOutcome:
    goal, started_s, says = goal_of(base), clock(), ""
    try:
        keys, says = apply_change(spec, change, able=goal.changes)
        plan = plan_keys(keys, share_s)
    except (TunerError, SolverError, ProfilerError) as error:
        reason = " ".join(str(error).split())
        return WhatIfOutcome(change=str(change), says=says, status="refused", reason=reason)
    outcome = to_outcome(
        plan, change=str(change), says=says, base=base, solve_s=max(0.0, clock() - started_s)
    )
    if change.key == "nodes" and goal.gains_nothing(plan, base, outcome.gain_ratio or 0.0):
        return outcome.model_copy(update={"reason": f"{outcome.reason}; {IDLE}"})
    return outcome


def _plan_keys(
    spec: PlannedSpec,
    keys: Keys,
    *,
    profiles: Sequence[Path],
    time_limit_s: float,
    calibrated: bool,
) -> StoredPlan:
    """Plan the keys of a spec, through a temporary file.

    Raises:
        TunerError: the spec is unusable; the message does not name the file.
    """
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        path = Path(scratch) / "spec.yaml"
        path.write_text(yaml.safe_dump(dict(keys), sort_keys=False), encoding="utf-8")
        try:
            # The function's types are those of training, and the residual is of the goal's own.
            residual: Keys = {"residual": spec.residual}
            made = plan_spec(
                path,
                profiles=profiles,
                time_limit_s=time_limit_s,
                calibrated=calibrated,
                # What the target lacks is of no use in a plan that nobody launches.
                with_unlaunchable=False,
                **residual,
            )
        except TunerError as error:
            shown = str(error).replace(f"{shown_path(path)}: ", "").replace(f"{path}: ", "")
            raise type(error)(shown) from error
    return made.plan
