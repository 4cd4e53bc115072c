"""`moetune verify`: launch a plan's candidates for a few steps each, and let that decide."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tuner.cli import options
from tuner.cli.text import print_exact, print_text, tell
from tuner.cli.verify_budget import budget_of
from tuner.cli.verify_deployment import verify_deployment
from tuner.cli.verify_options import refuse_unfit, written_options

if TYPE_CHECKING:
    from tuner.verify.command import CommandLauncher
    from tuner.verify.slurm.launcher import SlurmLauncher

PLACEMENT_BUDGET_S = 30.0
"""Of measuring a placement and its alternatives."""

LauncherName = Literal["local", "slurm", "command"]
NetworkName = Literal["own", "host"]
DEPLOYMENTS = "Where the plan serves"
BUDGET = "Budget"
LAUNCHERS = "Launchers"
SHARING = "Again, or several at a time"


def command(
    context: typer.Context,
    plan: options.PlanArgument,
    trials: Annotated[int, typer.Option(min=1, help="Launches in all.")] = 8,
    steps: Annotated[int, typer.Option(min=3, help="Timed steps of each launch.")] = 8,
    budget: Annotated[
        str,
        typer.Option(
            help="Wall time of all trials, e.g. 2h; smaller jobs stand for whole ones where that"
            " tells more.",
            metavar="TIME",
            rich_help_panel=BUDGET,
        ),
    ] = "",
    max_devices: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most devices that trials may use at a time.", rich_help_panel=BUDGET
        ),
    ] = None,
    launcher: Annotated[
        LauncherName,
        typer.Option(
            help="How trials are started; local: ranks here; slurm: a job each; command: yours.",
            rich_help_panel=LAUNCHERS,
        ),
    ] = "local",
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            help="Option of sbatch, e.g. partition=gpu; repeatable.",
            metavar="NAME=VALUE",
            rich_help_panel=LAUNCHERS,
        ),
    ] = None,
    slurm_wait: Annotated[
        str,
        typer.Option(
            help="How long a job may wait for its nodes.", metavar="TIME", rich_help_panel=LAUNCHERS
        ),
    ] = "24h",
    requeue: Annotated[
        bool,
        typer.Option(
            help="Start a job again after a failed node or preemption.", rich_help_panel=LAUNCHERS
        ),
    ] = True,
    parallel: Annotated[
        int,
        typer.Option(min=1, max=64, help="Jobs of Slurm at a time.", rich_help_panel=LAUNCHERS),
    ] = 1,
    command: Annotated[
        str,
        typer.Option(
            help="Your launcher, e.g. 'bash {launch}/run.sh --training.steps {steps}'.",
            rich_help_panel=LAUNCHERS,
        ),
    ] = "",
    network: Annotated[
        NetworkName,
        typer.Option(
            help="Of trials that your command runs on this machine alone: own, with nothing but"
            " loopback where that can be made, or host, for programs that load from elsewhere.",
            rich_help_panel=LAUNCHERS,
        ),
    ] = "own",
    metrics: Annotated[
        str,
        typer.Option(
            help="What its output is read as: megatron, torchtitan, deepspeed, jsonl (default) or"
            " regex:EXPRESSION with a group step_s; of a deployment its client: vllm-bench"
            " (default), sglang-bench or aiperf.",
            show_default=False,
            rich_help_panel=LAUNCHERS,
        ),
    ] = "",
    bench: Annotated[
        str,
        typer.Option(
            help="Your client, e.g. 'python bench.py --url {url} --output {result}'; the emitted"
            " benchmark where absent.",
            rich_help_panel=DEPLOYMENTS,
        ),
    ] = "",
    url: Annotated[
        str,
        typer.Option(
            help="Where the deployment answers; absent: as launch/local/local.sh starts it.",
            rich_help_panel=DEPLOYMENTS,
        ),
    ] = "",
    health: Annotated[
        list[str] | None,
        typer.Option(
            help="Address that answers once the deployment is ready; repeatable; absent:"
            " URL/health.",
            metavar="URL",
            rich_help_panel=DEPLOYMENTS,
        ),
    ] = None,
    runs: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Runs of the client against each launch.",
            rich_help_panel=DEPLOYMENTS,
        ),
    ] = 3,
    start_limit: Annotated[
        str,
        typer.Option(
            help="How long a deployment may take until it answers.",
            metavar="TIME",
            rich_help_panel=DEPLOYMENTS,
        ),
    ] = "30min",
    repeats: Annotated[
        int, typer.Option(min=0, max=16, help="Further launches of both while two tie for first.")
    ] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            help="Go on after the trials that have ended, beside whoever is at it.",
            rich_help_panel=SHARING,
        ),
    ] = False,
    storage: Annotated[
        str,
        typer.Option(
            help="Share the trials through a database, postgresql://user@host/name (password in"
            " PGPASSWORD or ~/.pgpass); absent: with all who see the plan's folder.",
            metavar="URL",
            rich_help_panel=SHARING,
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print verified.json.")] = False,
) -> None:
    """Verify a plan: launch its candidates, recalibrate the model, refresh the launch files."""
    from tuner.plan_folder import kind_of_plan

    kind = kind_of_plan(plan)
    refuse_unfit(written_options(context), kind=kind, launcher=launcher, parallel=parallel)
    if kind == "place":
        _verify_placement(plan, as_json=as_json)
        return
    if kind == "serve":
        verify_deployment(
            plan,
            launcher=launcher,
            command=command,
            bench=bench,
            metrics=metrics or "vllm-bench",
            url=url,
            health=tuple(health or ()),
            runs=runs,
            start_limit=start_limit,
            trials=trials,
            repeats=repeats,
            resume=resume,
            as_json=as_json,
        )
        return
    from tuner import api
    from tuner.cli.trials import live_table
    from tuner.cli.verify_text import verified_text
    from tuner.errors import SpecError
    from tuner.units import parse_seconds
    from tuner.verify.verification import Effort
    from tuner.verify_api import command_trials, slurm_trials

    limits = budget_of(budget, max_devices)
    by: SlurmLauncher | CommandLauncher | None = None
    if launcher == "slurm":
        try:
            queue_s = parse_seconds(slurm_wait)
        except ValueError as error:
            raise SpecError(f"--slurm-wait: {error}") from error
        by = slurm_trials(options=slurm or (), requeue=requeue, queue_s=queue_s, told=_tell)
    elif launcher == "command":
        by = command_trials(
            command=command,
            metrics=metrics or "jsonl",
            folder=plan,
            network=network,
            told=_tell,
        )
    effort = Effort(trials=trials, steps=steps, parallel=parallel, repeats=repeats)
    with live_table(total=trials) as watcher:
        verified = api.verify(
            plan,
            effort=effort,
            resume=resume,
            watcher=watcher,
            by=by,
            storage=storage,
            told=_tell,
            budget=limits,
        )
    if as_json:
        print_exact(verified.model_dump_json(indent=2))
    else:
        print_text(verified_text(verified, folder=plan))
    if verified.winner is None:
        raise typer.Exit(1)


def _tell(line: str) -> None:
    tell(f"  {line}")


def _verify_placement(folder: Path, *, as_json: bool) -> None:
    from tuner.api import verify_place
    from tuner.cli.place_text import place_verified_text

    verified = verify_place(folder, budget_s=PLACEMENT_BUDGET_S)
    if as_json:
        print_exact(verified.model_dump_json(indent=2))
    else:
        print_text(place_verified_text(verified))
