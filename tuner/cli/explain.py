"""`moetune explain`: why this plan and not another."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    plan: Annotated[Path, typer.Argument(help="Folder of a plan.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Explain a plan: time and memory by stage, what is proven, why each runner-up lost."""
    from tuner.cli.plan_text import explanation
    from tuner.cli.verify_text import verdict_text
    from tuner.plan_folder import kind_of_plan, read_plan, read_verified

    kind = kind_of_plan(plan)
    if kind == "place":
        _explain_placement(plan, as_json=as_json)
        return
    if kind == "serve":
        _explain_deployment(plan, as_json=as_json)
        return
    made, verified = read_plan(plan), read_verified(plan)
    if as_json:
        print(made.model_dump_json(indent=2))
    else:
        print(explanation(made))
        if verified is not None:
            print(f"\n{verdict_text(verified)}")
    if made.decision is None:
        raise typer.Exit(1)


def _explain_placement(folder: Path, *, as_json: bool) -> None:
    from tuner.cli.place_text import place_explanation
    from tuner.place_folder import read_place_plan

    made = read_place_plan(folder)
    print(made.model_dump_json(indent=2) if as_json else place_explanation(made))
    if made.decision is None:
        raise typer.Exit(1)


def _explain_deployment(folder: Path, *, as_json: bool) -> None:
    from tuner.cli.serve_text import serve_explanation
    from tuner.serve_folder import read_serve_plan

    made = read_serve_plan(folder)
    print(made.model_dump_json(indent=2) if as_json else serve_explanation(made))
    if made.decision is None:
        raise typer.Exit(1)
