"""Options and output of the commands where the goal is to place experts."""

from pathlib import Path
from typing import Final

from tuner.cli.goals import EstimateOptions, VerifyOptions
from tuner.cli.text import print_result, screen

VERIFY_OPTIONS: Final[tuple[str, ...]] = ()
PURPOSE: Final = "for plans that place experts"
OTHER_LAUNCHER: Final = "a placement is measured here; leave it out"
BUDGET_S: Final = 30.0
"""Seconds for measuring a placement and its alternatives."""


def estimate(spec: Path, options: EstimateOptions) -> None:
    """Refuse: no launch file states a placement; what reads training specs says so."""
    from tuner.cli import train

    train.estimate(spec, options)


def verify(folder: Path, options: VerifyOptions) -> None:
    """Measure a placement and its alternatives here and print the conclusion."""
    from tuner.goals.place_plan import verify_place
    from tuner.report.place_page import place_trials_section
    from tuner.report.terminal import sections_text

    verified = verify_place(folder, budget_s=BUDGET_S)
    print_result(
        verified,
        lambda one: sections_text((place_trials_section(one),), screen(verbose=True)),
        as_json=options.as_json,
    )
