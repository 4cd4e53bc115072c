"""Options of `moetune verify` by the plans and launchers they apply to; others are refused.

An option counts if it was written, whatever its value: the defaults fit every plan.
"""

from collections.abc import Iterable
from typing import Final

import typer

FOR_SLURM: Final = ("--slurm", "--slurm-wait", "--requeue", "--no-requeue")
FOR_COMMAND: Final = ("--command", "--metrics")

WRITTEN: Final = "COMMANDLINE"


def written_options(context: typer.Context) -> tuple[str, ...]:
    """Return the options that the user wrote, in the order of the help."""
    options = []
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != WRITTEN:
            continue
        is_off = context.params[name] is False and parameter.secondary_opts
        options.append((parameter.secondary_opts if is_off else parameter.opts)[0])
    return tuple(option for option in options if option.startswith("--"))


def refuse_unfit(
    written: Iterable[str], *, kind: str | None, launcher: str, parallel: int = 1
) -> None:
    """Refuse options that would change nothing.

    Args:
        written: by the user.
        kind: of the plan's goal.
        launcher: how trials are started.
        parallel: jobs at a time.

    Raises:
        SpecError: it names them and what they apply to.
    """
    from tuner.cli.goals import commands_of
    from tuner.errors import SpecError
    from tuner.goals.registry import GOALS

    given = tuple(written)
    for commands in map(commands_of, GOALS):
        if commands is not commands_of(kind):
            _refuse(_common(commands.VERIFY_OPTIONS, given), commands.PURPOSE)
    if launcher != "local" and (why := commands_of(kind).OTHER_LAUNCHER):
        raise SpecError(f"--launcher {launcher}: {why}")
    if parallel > 1 and launcher != "slurm":
        raise SpecError(f"--parallel {parallel}: only jobs of Slurm run side by side; leave it out")
    for options, required in ((FOR_SLURM, "slurm"), (FOR_COMMAND, "command")):
        if launcher != required:
            _refuse(_common(options, given), f"for --launcher {required}", instead="add that, or ")


def _common(options: tuple[str, ...], given: tuple[str, ...]) -> list[str]:
    return [option for option in options if option in given]


def _refuse(options: list[str], purpose: str, *, instead: str = "") -> None:
    from tuner.errors import SpecError

    if not options:
        return
    *first, last = options
    named = f"{', '.join(first)} and {last}" if first else last
    verb, them = ("are", "them") if first else ("is", "it")
    raise SpecError(f"{named} {verb} {purpose}; {instead}leave {them} out")
