"""Options and output of the commands where the goal is to place experts."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from tuner.cli.goals import EstimateOptions, PlanOptions, VerifyOptions
from tuner.cli.text import print_result, screen

if TYPE_CHECKING:
    from tuner.plans.place import PlacePlan
    from tuner.report.content import Report

VERIFY_OPTIONS: Final[tuple[str, ...]] = ()
PURPOSE: Final = "for plans that place experts"
OTHER_LAUNCHER: Final = "a placement is measured here; leave it out"
BUDGET_S: Final = 30.0
"""Seconds for measuring a placement and its alternatives."""


def plan(spec: Path, options: PlanOptions) -> "PlacePlan":
    """Plan a placement, write it, and return it."""
    from tuner.cli.progress import planning_progress
    from tuner.goals.place_folder import write_place_plan
    from tuner.goals.place_plan import place

    with planning_progress(
        "placing",
        text="reading recordings, solving, evaluating hold-out passes",
        limit_s=options.time_limit_s,
    ):
        made = place(
            spec,
            profiles=tuple(options.profile or ()),
            time_limit_s=options.time_limit_s,
            calibrated=not options.uncalibrated,
        )
    return write_place_plan(options.out, made.plan, spec=made.spec, maps=made.maps)


def estimate(spec: Path, options: EstimateOptions) -> None:
    """Refuse: no launch file states a placement; what reads training specs says so."""
    from tuner.cli import train

    train.estimate(spec, options)


def report(plan: "PlacePlan", _folder: Path | None = None) -> "Report":
    """Return the report that is printed of a plan."""
    from tuner.report.place_page import place_report

    return place_report(plan)


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
