"""Options and output of the commands where the goal is reinforcement learning: the estimate."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tuner.cli.goals import EstimateOptions
from tuner.cli.text import print_result

if TYPE_CHECKING:
    from tuner.estimate.rl.records import RlEstimate


def estimate(spec: Path, options: EstimateOptions) -> None:
    """Price a launch of reinforcement learning and print it.

    Raises:
        SpecError: an option is for other goals, or an input cannot be used.
    """
    from tuner.cli.progress import planning_progress
    from tuner.errors import SpecError
    from tuner.goals.estimate import estimate_rl

    for name, value in (("--profile", options.profile), ("--format", options.format_name)):
        if value:
            raise SpecError(f"{name}: launches of goal.kind rl are priced on datasheets, as read")
    with planning_progress("pricing", text="the launch, and changes of one thing"):
        result = estimate_rl(
            spec, launch=options.launch, log=options.log, calibrated=not options.uncalibrated
        )
    print_result(result, _text, as_json=options.as_json)
    if not result.fits:
        raise typer.Exit(1)


def _text(result: "RlEstimate") -> str:
    from tuner.cli.text import whole_text
    from tuner.report.rl_estimate import rl_estimate_blocks

    return whole_text(*rl_estimate_blocks(result))
