"""Reports as functions, for the command line and notebooks."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from profilers.errors import ProfilerError
from tuner.errors import TunerError
from tuner.explain.goals import read_any_plan
from tuner.explain.other_limits import what_ifs
from tuner.explain.planned_spec import read_planned_spec
from tuner.goals.serve import price_serving_pool
from tuner.goals.serve_folder import read_serve_plan
from tuner.goals.train_folder import plan_kind
from tuner.paths import AnyPath, plan_folder, to_paths
from tuner.plans.what_if import parse_changes
from tuner.report.content import Report
from tuner.report.read import WhatIfEvidence, build_report
from tuner.report.replay import Replay, at_planned_rate, replayed
from tuner.report.what_if_curves import what_if_requests
from tuner.search.progress import PlanningEvent, ProgressListener, ignore_progress
from tuner.search.serve.prefix_reuse import recorded_prompts
from tuner.spec.serving.read import read_serve_spec


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
    # A report without a decision shows the plan's relaxations and no curves.
    if not with_what_if or read_any_plan(folder).decision is None:
        return build_report(folder)
    kind = plan_kind(folder)
    changes = parse_changes(",".join(what_if_requests(folder)))
    replay: Replay | None = None
    try:
        result = what_ifs(
            folder,
            changes,
            profiles=profiles,
            time_limit_s=time_limit_s,
            calibrated=calibrated,
            watch=watch,
        )
        if kind == "serve":
            watch(
                PlanningEvent(
                    stage="simulating", text="the traffic, at the planned rate and at others"
                )
            )
            replay = replay_deployment(folder, profiles=profiles)
    except (TunerError, ProfilerError) as error:
        raise type(error)(f"{error}; --no-what-if reports on what is stored") from error
    return build_report(
        folder, what_if=WhatIfEvidence(changes=changes, result=result), replay=replay
    )


def replay_deployment(folder: Path, *, profiles: Sequence[Path] = ()) -> Replay | None:
    """Simulate the traffic of a deployment's plan again; None where that is not possible.

    Raises:
        PlanUnreadableError: the folder no longer has its plan or spec.
        SpecError: the spec can no longer be read.
    """
    plan = read_serve_plan(folder)
    if plan.decision is None:
        return None
    keys = read_planned_spec(folder, plan).keys
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        path = Path(scratch) / "spec.yaml"
        path.write_text(yaml.safe_dump(dict(keys), sort_keys=False), encoding="utf-8")
        spec = at_planned_rate(read_serve_spec(path), plan.goal)
        priced_pools = tuple(price_serving_pool(pool, profiles) for pool in spec.cluster.pools)
        hits = None
        if plan.prefix_reuse is not None and plan.predicted is not None:
            rate = plan.predicted.requests_per_s
            prompts = recorded_prompts(spec, rate_per_s=rate)
            hits = None if prompts is None else prompts.under(plan.prefix_reuse)
        return replayed(spec, priced_pools, plan.decision, hits=hits)
