"""Reports as functions, for the command line and notebooks."""

from collections.abc import Sequence

from profilers.errors import ProfilerError
from tuner.errors import TunerError
from tuner.explain.other_limits import what_ifs
from tuner.goals.registry import goal_of_folder
from tuner.paths import AnyPath, plan_folder, to_paths
from tuner.report.content import Report
from tuner.report.what_if import what_if_section
from tuner.search.progress import ProgressListener, ignore_progress


def report(
    folder: AnyPath,
    *,
    with_what_if: bool = True,
    profiles: AnyPath | Sequence[AnyPath] = (),
    time_limit_s: float = 60.0,
    calibrated: bool = True,
    watch: ProgressListener = ignore_progress,
) -> Report:
    """Report on the plan of a folder, solved under other limits and, for serving, simulated again.

    Args:
        folder: of the plan.
        with_what_if: False reads stored results only, as for a plan without a decision.
        profiles: as for `moetune plan`; a training plan stores its own.
        time_limit_s: for all solves under other limits together.
        calibrated: as the plan was made.
        watch: called with progress.

    Raises:
        PlanUnreadableError: there is no plan, or a file beside it is damaged.
        SpecError: the plan's problem can no longer be built; the message says what is missing.
    """
    folder = plan_folder(folder)
    profiles = to_paths(profiles)
    goal = goal_of_folder(folder)
    plan = goal.read(folder)
    # A report without a decision shows the plan's relaxations and no what-ifs.
    if not with_what_if or plan.decision is None:
        return goal.report(folder)
    try:
        result = what_ifs(
            folder,
            goal.usual_changes(plan),
            profiles=profiles,
            time_limit_s=time_limit_s,
            calibrated=calibrated,
            watch=watch,
        )
        replay = goal.replay(folder, profiles=profiles, watch=watch)
    except (TunerError, ProfilerError) as error:
        raise type(error)(f"{error}; --no-what-if reports on what is stored") from error
    return goal.report(folder, what_if=what_if_section(result), replay=replay)
