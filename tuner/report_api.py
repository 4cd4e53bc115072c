"""Reports as functions: what the command line calls and a notebook can call too."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from profilers.errors import ProfilerError
from tuner.errors import TunerError
from tuner.explain.other_limits import what_ifs
from tuner.explain.planned_spec import question_of, read_any_plan
from tuner.paths import AnyPath, paths_of, plan_folder
from tuner.plan_folder import kind_of_plan
from tuner.planner.progress import Told, Watch, unwatched
from tuner.planner.serve.prefix_reuse import recorded_prompts
from tuner.report.content import Report
from tuner.report.read import Asked, report_of
from tuner.report.replay import Replay, at_planned_rate, replayed
from tuner.report.what_if_curves import questions_of
from tuner.serve_api import site_of
from tuner.serve_folder import read_serve_plan
from tuner.spec.serving.read import read_serve_spec
from tuner.what_if import parse_changes


def report(
    folder: AnyPath,
    *,
    with_what_if: bool = True,
    profiles: AnyPath | Sequence[AnyPath] = (),
    time_limit_s: float = 60.0,
    calibrated: bool = True,
    watch: Watch = unwatched,
) -> Report:
    """Report on the plan of a folder, solved under other limits and played again where it serves.

    Args:
        folder: of the plan.
        with_what_if: False reads what lies there and computes nothing, as where the plan has no
            decision.
        profiles: as for `moetune plan`; a training plan holds its own.
        time_limit_s: for all solves under other limits together.
        calibrated: as the plan was made.
        watch: told what is being computed.

    Raises:
        PlanUnreadableError: there is no plan, or what lies beside it is damaged.
        SpecError: the plan's own question can no longer be asked; the message says what is gone.
    """
    folder = plan_folder(folder)
    profiles = paths_of(profiles)
    # A page without a decision shows ways out, which the plan holds, and no curves.
    if not with_what_if or read_any_plan(folder).decision is None:
        return report_of(folder)
    kind = kind_of_plan(folder)
    changes = parse_changes(",".join(questions_of(folder)))
    replay: Replay | None = None
    try:
        found = what_ifs(
            folder,
            changes,
            profiles=profiles,
            time_limit_s=time_limit_s,
            calibrated=calibrated,
            watch=watch,
        )
        if kind == "serve":
            watch(Told(stage="playing", text="the traffic, at the planned rate and at others"))
            replay = replay_of(folder, profiles=profiles)
    except (TunerError, ProfilerError) as error:
        raise type(error)(f"{error}; --no-what-if reports on what is stored") from error
    return report_of(folder, asked=Asked(changes=changes, found=found), replay=replay)


def replay_of(folder: Path, *, profiles: Sequence[Path] = ()) -> Replay | None:
    """Play the traffic of a deployment's plan again; None where that cannot be done.

    Raises:
        PlanUnreadableError: the folder no longer holds its plan or spec.
        SpecError: the spec can no longer be read.
    """
    plan = read_serve_plan(folder)
    if plan.decision is None:
        return None
    keys = question_of(folder, plan).keys
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        path = Path(scratch) / "spec.yaml"
        path.write_text(yaml.safe_dump(dict(keys), sort_keys=False), encoding="utf-8")
        spec = at_planned_rate(read_serve_spec(path), plan.goal)
        sites = tuple(site_of(pool, profiles) for pool in spec.cluster.pools)
        hits = None
        if plan.prefix_reuse is not None and plan.predicted is not None:
            rate = plan.predicted.requests_per_s
            prompts = recorded_prompts(spec, rate_per_s=rate)
            hits = None if prompts is None else prompts.under(plan.prefix_reuse)
        return replayed(spec, sites, plan.decision, hits=hits)
