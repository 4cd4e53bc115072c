"""`moetune estimate`: what the launch of today does, and the smallest change that beats it."""

from pathlib import Path
from typing import Annotated

import typer

from tuner.cli.text import print_exact, print_text


def command(
    spec: Annotated[
        Path,
        typer.Argument(help="The spec, a YAML file: model, cluster, defaults.", show_default=False),
    ],
    launch: Annotated[
        str,
        typer.Option(
            "--launch",
            help="Launch file (shell script, arguments, YAML, TOML, JSON), or the command itself.",
        ),
    ],
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="megatron, torchtitan or deepspeed; by the file's ending when left out. Of a "
            "deployment sglang, vllm or trtllm; by the command when left out.",
        ),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="Stored profile of accelerators; repeatable, matched by device. Default: the "
            "spec's."
        ),
    ] = None,
    uncalibrated: Annotated[
        bool, typer.Option("--uncalibrated", help="Drop the residuals that ship with moetune.")
    ] = False,
    pool: Annotated[
        str | None, typer.Option(help="Of a deployment: the pool that the launch runs on.")
    ] = None,
    instances: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of a deployment: equal launches that share the traffic. Default: the replicas "
            "of a file of Kubernetes objects, else 1.",
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            help="Of a deployment's file that starts several servers: prefill, decode or "
            "aggregated, or the name of a group."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the estimate as JSON.")] = False,
) -> None:
    """Price the launch of today: time or latency, memory, what to change."""
    from tuner.api import estimate
    from tuner.cli.estimate_serve import estimate_serving
    from tuner.cli.estimate_text import estimate_text
    from tuner.cli.progress import planning
    from tuner.planner.progress import Told
    from tuner.spec.kind import goal_kind

    if goal_kind(spec) == "serve":
        estimate_serving(
            spec,
            launch=launch,
            format_name=format_name,
            profiles=tuple(profile or ()),
            pool=pool,
            instances=instances,
            role=role,
            as_json=as_json,
        )
        return
    with planning() as watch:
        watch(Told(stage="pricing", text="the launch, and changes of one thing"))
        found = estimate(
            spec,
            launch=launch,
            format_name=format_name,
            profiles=tuple(profile or ()),
            calibrated=not uncalibrated,
        )
    if as_json:
        print_exact(found.model_dump_json(indent=2))
    else:
        print_text(estimate_text(found))
    if not found.fits:
        raise typer.Exit(1)
