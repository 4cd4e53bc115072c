"""`moetune estimate`: price an existing launch and find the smallest change that beats it."""

from pathlib import Path
from typing import Annotated

import typer


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
            help="megatron, torchtitan or deepspeed (default: by file suffix); for a deployment "
            "sglang, vllm or trtllm (default: by the command).",
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
        str | None, typer.Option(help="Deployment: the pool that the launch runs on.")
    ] = None,
    instances: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Deployment: identical instances that share the traffic. Default: the replicas "
            "in Kubernetes manifests, else 1.",
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            help="Deployment whose file starts several servers: prefill, decode or aggregated, or "
            "the name of a group."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the estimate as JSON.")] = False,
) -> None:
    """Price an existing launch, and find what would beat it.

    Step time or latency, memory, and the smallest changes that make it better.
    """
    from tuner.cli.goals import EstimateOptions, commands_of
    from tuner.spec.kind import goal_kind

    chosen = EstimateOptions(
        launch=launch,
        format_name=format_name,
        profiles=tuple(profile or ()),
        calibrated=not uncalibrated,
        pool=pool,
        instances=instances,
        role=role,
        as_json=as_json,
    )
    commands_of(goal_kind(spec)).estimate(spec, chosen)
