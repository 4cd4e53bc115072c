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
    from tuner.plan_folder import read_plan

    made = read_plan(plan)
    print(made.model_dump_json(indent=2) if as_json else explanation(made))
    if made.decision is None:
        raise typer.Exit(1)
