"""`moetune explain`: why this plan was chosen, and what would change it."""

from typing import Annotated

import typer

from tuner.cli import options
from tuner.cli.text import print_exact, print_text


def command(
    plan: options.PlanArgument,
    what_if: Annotated[
        str,
        typer.Option(
            "--what-if",
            help="Changes to solve for, e.g. nodes=+1,memory=-20%,bandwidth=x2,batch=512, or "
            "'none'. Default: a standard set.",
        ),
    ] = "",
    profile: options.ProfilesOption = None,
    time_limit: options.WhatIfTimeOption = "60s",
    uncalibrated: options.UncalibratedFlag = False,
    verbose: options.VerboseFlag = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan and `why` as JSON.")
    ] = False,
) -> None:
    """Explain a plan: breakdown, certificate, what-ifs.

    Each what-if is solved again from the copies that the plan keeps of its inputs. Recordings of a
    placement, a deployment's trace, and the profiles of both are read where they were.
    """
    from tuner.cli.options import seconds
    from tuner.cli.plan_text import explanation
    from tuner.cli.progress import planning_progress
    from tuner.explain.explanation import explain
    from tuner.plans.what_if import parse_changes

    limit_s = seconds(time_limit, option="--time-limit")
    changes = None if not what_if else () if what_if == "none" else parse_changes(what_if)
    with planning_progress(limit_s=limit_s) as watch:
        explained = explain(
            plan,
            changes=changes,
            profiles=tuple(profile or ()),
            time_limit_s=limit_s,
            calibrated=not uncalibrated,
            watch=watch,
        )
    if as_json:
        print_exact(explained.model_dump_json(indent=2))
    else:
        print_text(explanation(explained, why=explained.why, folder=plan, verbose=verbose))
    if explained.decision is None:
        raise typer.Exit(1)
