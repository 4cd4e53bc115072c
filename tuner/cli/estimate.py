"""`moetune estimate`: price an existing launch and find the smallest change that beats it."""

from pathlib import Path
from typing import Annotated

import typer

from tuner.cli.goals import EstimateOptions, commands_of
from tuner.cli.options import expanded


@expanded
def command(
    *,
    spec: Annotated[
        Path,
        typer.Argument(help="The spec, a YAML file: model, cluster, defaults.", show_default=False),
    ],
    options: EstimateOptions,
) -> None:
    """Price an existing launch, and find what would beat it.

    Step time or latency, memory, and the smallest changes that make it better.
    """
    from tuner.errors import SpecError
    from tuner.spec.kind import ONLY_ESTIMATED, goal_kind

    kind = goal_kind(spec)
    if options.log is not None and kind != ONLY_ESTIMATED:
        raise SpecError(f"--log: timers are compared where goal.kind is {ONLY_ESTIMATED}")
    commands_of(kind).estimate(spec, options)
