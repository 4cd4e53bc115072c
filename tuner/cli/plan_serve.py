"""`moetune plan` where the goal is to serve."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.text import print_exact, print_text

if TYPE_CHECKING:
    from tuner.plans.serve import ServePlan


def plan_serve(
    spec: Path,
    *,
    out: Path,
    profiles: Sequence[Path],
    time_limit_s: float,
    verbose: bool,
    as_json: bool,
) -> "ServePlan":
    """Plan a deployment, write it, print it and return it."""
    from tuner.api import deploy, write_serve_plan
    from tuner.cli.progress import planning_progress
    from tuner.cli.serve_text import serve_text
    from tuner.search.progress import PlanningEvent

    with planning_progress(limit_s=time_limit_s) as watch:
        watch(
            PlanningEvent(
                stage="planning", text="pricing instances, solving, simulating the traffic"
            )
        )
        made = deploy(spec, profiles=profiles, time_limit_s=time_limit_s)
    written = write_serve_plan(out, made.plan, spec=made.spec)
    if as_json:
        print_exact(written.model_dump_json(indent=2))
    else:
        print_text(serve_text(written, folder=out, verbose=verbose))
    return written
