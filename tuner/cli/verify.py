"""`moetune verify`: launch a plan's candidates for a few steps each, and let that decide."""

from pathlib import Path
from typing import Annotated, Literal

import typer

PLACEMENT_BUDGET_S = 30.0
"""Of measuring a placement and its alternatives."""


def command(
    plan: Annotated[Path, typer.Argument(help="Folder of a plan.", show_default=False)],
    trials: Annotated[int, typer.Option(min=1, help="Launches in all.")] = 8,
    steps: Annotated[int, typer.Option(min=3, help="Timed steps of each launch.")] = 8,
    launcher: Annotated[
        Literal["local"], typer.Option(help="How trials are started; local: torchrun here.")
    ] = "local",
    resume: Annotated[bool, typer.Option(help="Go on after the trials that have ended.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print verified.json.")] = False,
) -> None:
    """Verify a plan: launch its candidates, recalibrate the model, refresh the launch files."""
    del launcher  # One value so far; the name is part of the contract.
    from tuner.errors import PlanUnreadableError
    from tuner.plan_folder import kind_of_plan

    kind = kind_of_plan(plan)
    if kind == "place":
        _verify_placement(plan, as_json=as_json)
        return
    if kind == "serve":
        raise PlanUnreadableError(
            f"{plan}: deployments are not launched by this version; start the files in launch/ and"
            " run the benchmark job beside them"
        )
    from tuner import api
    from tuner.cli.trials import live_table
    from tuner.cli.verify_text import verified_text
    from tuner.verify.verification import Effort

    with live_table(total=trials) as watcher:
        verified = api.verify(
            plan, effort=Effort(trials=trials, steps=steps), resume=resume, watcher=watcher
        )
    print(verified.model_dump_json(indent=2) if as_json else verified_text(verified, folder=plan))
    if verified.winner is None:
        raise typer.Exit(1)


def _verify_placement(folder: Path, *, as_json: bool) -> None:
    from tuner.api import verify_place
    from tuner.cli.place_text import place_verified_text

    verified = verify_place(folder, budget_s=PLACEMENT_BUDGET_S)
    print(verified.model_dump_json(indent=2) if as_json else place_verified_text(verified))
