"""`moetune plan` where the goal is to train."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.text import print_exact, print_text

if TYPE_CHECKING:
    from tuner.plans.train import Plan


def plan_train(
    spec: Path,
    *,
    out: Path,
    profiles: Sequence[Path],
    top: int,
    time_limit_s: float,
    method: str,
    calibrated: bool,
    verbose: bool,
    as_json: bool,
) -> "Plan":
    """Plan a training run, write it, print it and return it."""
    # Not from tuner.api, which brings every other command along.
    from profilers.affinity import usable_cores
    from tuner.cli.plan_text import plan_text
    from tuner.cli.progress import planning_progress
    from tuner.goals.train import plan_training
    from tuner.goals.train_folder import write_plan

    with planning_progress(limit_s=time_limit_s) as watch:
        made = plan_training(
            spec,
            profiles=profiles,
            top=top,
            time_limit_s=time_limit_s,
            method=method,
            calibrated=calibrated,
            processes=len(usable_cores()),
            watch=watch,
        )
    written = write_plan(out, made.plan, spec=made.spec, profiles=made.profiles)
    if as_json:
        print_exact(written.model_dump_json(indent=2))
    else:
        print_text(plan_text(written, folder=out, verbose=verbose))
    return written
