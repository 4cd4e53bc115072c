"""Options and output of the commands where the goal is to train."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from tuner.cli.goals import EstimateOptions, VerifyOptions
from tuner.cli.text import print_result, print_stderr

if TYPE_CHECKING:
    from tuner.verify.budget.budget import Budget
    from tuner.verify.command import CommandLauncher
    from tuner.verify.records import Verified
    from tuner.verify.slurm import SlurmLauncher

VERIFY_OPTIONS: Final = ("--steps", "--budget", "--max-devices", "--storage")
PURPOSE: Final = "for plans that train"
OTHER_LAUNCHER: Final = ""


def estimate(spec: Path, options: EstimateOptions) -> None:
    """Price a launch of a trainer and print it."""
    from tuner.cli.estimate_text import estimate_text
    from tuner.cli.progress import planning_progress
    from tuner.goals.estimate import estimate as estimate_launch

    with planning_progress("pricing", text="the launch, and changes of one thing"):
        result = estimate_launch(
            spec,
            launch=options.launch,
            format_name=options.format_name,
            profiles=tuple(options.profile or ()),
            calibrated=not options.uncalibrated,
        )
    print_result(result, estimate_text, as_json=options.as_json)
    if not result.fits:
        raise typer.Exit(1)


def verify(folder: Path, options: VerifyOptions) -> "Verified":
    """Launch the candidates of a plan and return the conclusion.

    Raises:
        TunerError: an option cannot be read.
    """
    from tuner.cli.trials import trial_lines
    from tuner.goals.verify import verify as verify_plan
    from tuner.verify.verification import Effort

    effort = Effort(
        trials=options.trials,
        steps=options.steps,
        parallel=options.parallel,
    )
    budget, by = _budget(options), _launcher(options)
    return verify_plan(
        folder,
        effort=effort,
        resume=options.resume,
        watcher=trial_lines(),
        by=by,
        storage=options.storage,
        on_message=_print_indented,
        budget=budget,
    )


def _launcher(options: VerifyOptions) -> "SlurmLauncher | CommandLauncher | None":
    from tuner.cli.options import seconds
    from tuner.goals.verify import command_trials, slurm_trials

    if options.launcher == "slurm":
        return slurm_trials(
            options=tuple(options.slurm or ()),
            requeue=options.requeue,
            queue_s=seconds(options.slurm_wait, option="--slurm-wait"),
            on_message=_print_indented,
        )
    if options.launcher == "command":
        return command_trials(command=options.command, metrics=options.metrics or "jsonl")
    return None


def _budget(options: VerifyOptions) -> "Budget | None":
    from tuner.cli.options import seconds
    from tuner.verify.budget.budget import Budget

    if not options.budget and options.max_devices is None:
        return None
    if not options.budget:
        return Budget(max_devices=options.max_devices)
    wall_s = seconds(options.budget, option="--budget")
    return Budget(wall_s=wall_s, max_devices=options.max_devices)


def _print_indented(line: str) -> None:
    print_stderr(f"  {line}")
