"""`moetune plan`: choose the configuration to launch, with a certificate, and write its files."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    spec: Annotated[Path, typer.Argument(help="The spec, a YAML file.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the plan.")],
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="Stored profile; repeatable, matched by device. Default: the spec's."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Decisions to return at least.")] = 5,
    time_limit: Annotated[
        str, typer.Option(help="For solving, with its unit; pricing comes on top.")
    ] = "60s",
    solver: Annotated[str, typer.Option(help="milp (CBC), cp_sat or exact.")] = "milp",
    uncalibrated: Annotated[
        bool, typer.Option("--uncalibrated", help="Drop the residuals that ship with moetune.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Plan a training run, a deployment or a placement of experts, and say what is proven."""
    from tuner import api
    from tuner.cli.options import seconds
    from tuner.cli.plan_place import plan_place
    from tuner.cli.plan_serve import plan_serve
    from tuner.cli.plan_text import plan_text
    from tuner.cli.progress import planning
    from tuner.plan_folder import write_plan
    from tuner.spec.kind import goal_kind

    kind = goal_kind(spec)
    if kind == "serve":
        plan_serve(
            spec,
            out=out,
            profiles=tuple(profile or ()),
            time_limit_s=seconds(time_limit, option="--time-limit"),
            as_json=as_json,
        )
        return
    if kind == "place":
        plan_place(
            spec,
            out=out,
            profiles=tuple(profile or ()),
            time_limit_s=seconds(time_limit, option="--time-limit"),
            calibrated=not uncalibrated,
            as_json=as_json,
        )
        return
    with planning() as watch:
        made = api.plan(
            spec,
            profiles=tuple(profile or ()),
            top=top,
            time_limit_s=seconds(time_limit, option="--time-limit"),
            method=solver,
            calibrated=not uncalibrated,
            watch=watch,
        )
    written = write_plan(out, made.plan, spec=made.spec, profiles=made.profiles)
    print(written.model_dump_json(indent=2) if as_json else plan_text(written, folder=out))
    if written.decision is None:
        raise typer.Exit(1)
