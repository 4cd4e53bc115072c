"""`moetune explain`: why this plan and not another, and what would change it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import options

if TYPE_CHECKING:
    from tuner.explain.explanation import Explained
from tuner.cli.text import print_exact, print_text


def command(
    plan: options.PlanArgument,
    what_if: Annotated[
        str,
        typer.Option(
            "--what-if",
            help="Changes to solve for, e.g. nodes=+1,memory=-20%,bandwidth=x2,batch=512; "
            "'none' asks nothing. Default: the usual ones.",
        ),
    ] = "",
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="As given to plan; a training plan holds its own copies."),
    ] = None,
    time_limit: Annotated[
        str, typer.Option(help="For the searches of all changes together, with its unit.")
    ] = "60s",
    uncalibrated: Annotated[bool, typer.Option("--uncalibrated", help="As given to plan.")] = False,
    verbose: options.VerboseFlag = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan and `why` as JSON.")
    ] = False,
) -> None:
    """Explain a plan: its parts, what is proven, why others lost, what other limits would change.

    Each change is solved anew from the plan's own copies; nothing is guessed.
    """
    from tuner.api import explain, parse_changes
    from tuner.cli.options import seconds
    from tuner.cli.progress import planning

    limit_s = seconds(time_limit, option="--time-limit")
    changes = None if not what_if else () if what_if == "none" else parse_changes(what_if)
    with planning(limit_s=limit_s) as watch:
        found = explain(
            plan,
            changes=changes,
            profiles=tuple(profile or ()),
            time_limit_s=limit_s,
            calibrated=not uncalibrated,
            watch=watch,
        )
    if as_json:
        print_exact(found.model_dump_json(indent=2))
    else:
        print_text(_text(found, folder=plan, verbose=verbose))
    if found.decision is None:
        raise typer.Exit(1)


def _text(found: "Explained", *, folder: Path, verbose: bool) -> str:
    from tuner.cli.explain_text import why_lines
    from tuner.cli.place_text import place_explanation
    from tuner.cli.plan_text import explanation
    from tuner.cli.serve_text import serve_explanation
    from tuner.cli.verify_text import verdict_text
    from tuner.place_plan import PlacePlan
    from tuner.plan_folder import read_verified
    from tuner.serve_plan import ServePlan

    why = why_lines(found.why, verbose=verbose)
    if isinstance(found, ServePlan):
        return "\n".join((serve_explanation(found, verbose=verbose), *why))
    if isinstance(found, PlacePlan):
        return "\n".join((place_explanation(found, verbose=verbose), *why))
    verified = read_verified(folder)
    trials = () if verified is None else ("", verdict_text(verified))
    return "\n".join((explanation(found, verbose=verbose), *why, *trials))
