"""`moetune verify`: launch a plan's candidates for a few steps each and choose by measurement."""

import typer

from tuner.cli.goals import VerifyOptions, commands_of
from tuner.cli.options import PlanArgument, expanded
from tuner.cli.text import print_result
from tuner.cli.verify_options import refuse_unfit, written_options


@expanded
def command(
    *,
    context: typer.Context,
    plan: PlanArgument,
    options: VerifyOptions,
) -> None:
    """Launch a plan's candidates and recalibrate.

    The launch files are rewritten for the fastest.
    """
    from tuner.goals.registry import goal_of_folder

    kind = goal_of_folder(plan).kind
    refuse_unfit(
        written_options(context), kind=kind, launcher=options.launcher, parallel=options.parallel
    )
    verified = commands_of(kind).verify(plan, options)

    from tuner.cli.plan_text import verified_text

    print_result(
        verified, lambda conclusion: verified_text(conclusion, folder=plan), as_json=options.as_json
    )
    if verified.winner is None:
        raise typer.Exit(1)
