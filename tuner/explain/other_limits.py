"""What a plan would be under other limits: each a true second solve of the plan's own question.

The question comes from the plan's folder (planned_spec.py), a limit is moved (changes.py), and what
`moetune plan` calls plans it. The plan's own question is solved again beside the others and in the
same way, so that answers are compared with it and not with a plan that was made with more time, by
another release or from other tables.

All questions share one time limit; each gets an equal part of what is left. As in a plan, the limit
is for searching and pricing comes on top, so the whole takes longer on large clusters. A question
whose turn comes after the limit is not asked, and says so.
"""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from profilers.errors import ProfilerError
from solvers.errors import SolverError
from tuner.errors import TunerError
from tuner.explain.changes import changed
from tuner.explain.outcomes import outcome_of
from tuner.explain.planned_spec import Question, StoredPlan, question_of, read_any_plan
from tuner.paths import AnyPath, paths_of, plan_folder
from tuner.place_api import place
from tuner.plan import Plan
from tuner.planner.progress import Told, Watch, unwatched
from tuner.serve_api import deploy
from tuner.spec.files import shown_path
from tuner.train_api import plan_training
from tuner.what_if import Change, Outcome, WhatIf

AS_PLANNED: Final = "as planned"
IDLE: Final = "a plan must use every device; without the added nodes the plan stays as it is"
"""Where more machines bring nothing."""
LEAST_S: Final = 1.0
"""Of search for one question; with less its answer would say little."""

Planned = Callable[[Mapping[str, Any], float], StoredPlan]


def what_if(
    folder: AnyPath,
    change: Change,
    *,
    profiles: AnyPath | Sequence[AnyPath] = (),
    time_limit_s: float = 20.0,
    calibrated: bool = True,
) -> Outcome:
    """Return what the plan of a folder would be after one change; see `what_ifs`."""
    folder = plan_folder(folder)
    profiles = paths_of(profiles)
    found = what_ifs(
        folder, (change,), profiles=profiles, time_limit_s=time_limit_s, calibrated=calibrated
    )
    return found.outcomes[0]


def what_ifs(
    folder: AnyPath,
    changes: Sequence[Change],
    *,
    profiles: AnyPath | Sequence[AnyPath] = (),
    time_limit_s: float = 60.0,
    calibrated: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    watch: Watch = unwatched,
) -> WhatIf:
    """Solve the question of a plan again, as it was asked and after each change.

    A change that the spec or the planner refuses is an outcome that says why.

    Args:
        folder: of the plan.
        changes: each asked alone.
        profiles: as for `moetune plan`; a training plan holds its own.
        time_limit_s: for the searches of all questions together.
        calibrated: as the plan was made.
        clock: for the limit and the reported times.
        watch: told which question is being solved.

    Raises:
        PlanUnreadableError: the folder holds no plan, or not the spec that it was made from.
        SpecError: the plan's own question can no longer be asked; the message says what is gone.
    """
    folder = plan_folder(folder)
    profiles = paths_of(profiles)
    question = question_of(folder, read_any_plan(folder))
    end_s = clock() + time_limit_s

    def solved(keys: Mapping[str, Any], limit_s: float) -> StoredPlan:
        return _planned(
            question, keys, profiles=profiles, time_limit_s=limit_s, calibrated=calibrated
        )

    watch(Told(stage="solving", text=f"{AS_PLANNED}, then {len(changes)} changes"))
    base = solved(question.keys, max(LEAST_S, time_limit_s / (1 + len(changes))))
    outcomes = []
    for number, change in enumerate(changes):
        left_s = end_s - clock()
        if left_s < LEAST_S and number:
            outcomes.append(_not_asked(change, time_limit_s))
            continue
        watch(Told(stage="solving", text=f"{change}, {number + 1} of {len(changes)}"))
        share_s = max(LEAST_S, left_s / (len(changes) - number))
        outcomes.append(_answered(question, change, base, solved, share_s=share_s, clock=clock))
    return WhatIf(
        base=outcome_of(
            base, change="", says=AS_PLANNED, base=None, solve_s=base.certificate.solve_s
        ),
        outcomes=tuple(outcomes),
        time_limit_s=time_limit_s,
    )


def _not_asked(change: Change, time_limit_s: float) -> Outcome:
    return Outcome(
        change=str(change),
        says="",
        status="out_of_time",
        reason=f"the {time_limit_s:g} s for all cases were used up; raise --time-limit",
    )


def _answered(
    question: Question,
    change: Change,
    base: StoredPlan,
    solved: Planned,
    *,
    share_s: float,
    clock: Callable[[], float],
) -> Outcome:
    started_s = clock()
    says = ""
    try:
        keys, says = changed(question, change)
        plan = solved(keys, share_s)
    except (TunerError, SolverError, ProfilerError) as error:
        reason = " ".join(str(error).split())
        return Outcome(change=str(change), says=says, status="refused", reason=reason)
    found = outcome_of(
        plan, change=str(change), says=says, base=base, solve_s=max(0.0, clock() - started_s)
    )
    if change.key == "nodes" and question.kind == "train" and _is_no_use(plan, base, found):
        return found.model_copy(update={"reason": f"{found.reason}; {IDLE}"})
    return found


def _is_no_use(plan: StoredPlan, base: StoredPlan, found: Outcome) -> bool:
    """Whether more machines than before cannot be used, or to no gain."""
    if not isinstance(plan, Plan) or not isinstance(base, Plan):
        return False
    more = plan.cluster.num_devices > base.cluster.num_devices
    return more and base.decision is not None and (found.gain_ratio or 0.0) <= 0.0


def _planned(
    question: Question,
    keys: Mapping[str, Any],
    *,
    profiles: Sequence[Path],
    time_limit_s: float,
    calibrated: bool,
) -> StoredPlan:
    """Plan the keys of a spec, as a file of their own that is gone afterwards.

    Raises:
        TunerError: the spec is unusable; the message does not name the file.
    """
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        path = Path(scratch) / "spec.yaml"
        path.write_text(yaml.safe_dump(dict(keys), sort_keys=False), encoding="utf-8")
        try:
            if question.kind == "serve":
                return deploy(path, profiles=profiles, time_limit_s=time_limit_s).plan
            if question.kind == "place":
                return place(
                    path, profiles=profiles, time_limit_s=time_limit_s, calibrated=calibrated
                ).plan
            return plan_training(
                path,
                profiles=profiles,
                time_limit_s=time_limit_s,
                calibrated=calibrated,
                with_unlaunchable=False,  # of a plan nobody launches
                residual=question.residual,
            ).plan
        except TunerError as error:
            shown = str(error).replace(f"{shown_path(path)}: ", "").replace(f"{path}: ", "")
            raise type(error)(shown) from error
