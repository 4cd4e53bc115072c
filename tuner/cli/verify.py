"""`moetune verify`: launch a plan's candidates for a few steps each, and let that decide."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from tuner.verify.command import CommandLauncher
    from tuner.verify.slurm.launcher import SlurmLauncher

PLACEMENT_BUDGET_S = 30.0
"""Of measuring a placement and its alternatives."""

LauncherName = Literal["local", "slurm", "command"]


def command(
    plan: Annotated[Path, typer.Argument(help="Folder of a plan.", show_default=False)],
    trials: Annotated[int, typer.Option(min=1, help="Launches in all.")] = 8,
    steps: Annotated[int, typer.Option(min=3, help="Timed steps of each launch.")] = 8,
    launcher: Annotated[
        LauncherName,
        typer.Option(
            help="How trials are started; local: torchrun here; slurm: a job each; command: yours."
        ),
    ] = "local",
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            help="Option of sbatch, e.g. partition=gpu; repeatable.", metavar="NAME=VALUE"
        ),
    ] = None,
    slurm_wait: Annotated[
        str, typer.Option(help="How long a job may wait for its nodes.", metavar="TIME")
    ] = "24h",
    requeue: Annotated[
        bool, typer.Option(help="Start a job again after a failed node or preemption.")
    ] = True,
    parallel: Annotated[int, typer.Option(min=1, max=64, help="Jobs of Slurm at a time.")] = 1,
    command: Annotated[
        str,
        typer.Option(help="Your launcher, e.g. 'bash {launch}/run.sh --training.steps {steps}'."),
    ] = "",
    metrics: Annotated[
        str,
        typer.Option(
            help="What its output is read as: megatron, torchtitan, deepspeed, jsonl or"
            " regex:EXPRESSION with a group step_s."
        ),
    ] = "jsonl",
    repeats: Annotated[
        int, typer.Option(min=0, max=16, help="Further launches of both while two tie for first.")
    ] = 0,
    resume: Annotated[bool, typer.Option(help="Go on after the trials that have ended.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print verified.json.")] = False,
) -> None:
    """Verify a plan: launch its candidates, recalibrate the model, refresh the launch files."""
    from tuner.errors import PlanUnreadableError, SpecError
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
    if parallel > 1 and launcher != "slurm":
        raise SpecError(f"--parallel {parallel}: only jobs of Slurm run side by side; leave it out")
    if slurm and launcher != "slurm":
        raise SpecError("--slurm is for --launcher slurm; add that, or leave it out")
    if command and launcher != "command":
        raise SpecError("--command is for --launcher command; add that, or leave it out")
    from tuner import api
    from tuner.cli.trials import live_table
    from tuner.cli.verify_text import verified_text
    from tuner.units import parse_seconds
    from tuner.verify.verification import Effort
    from tuner.verify_api import command_trials, slurm_trials

    by: SlurmLauncher | CommandLauncher | None = None
    if launcher == "slurm":
        try:
            queue_s = parse_seconds(slurm_wait)
        except ValueError as error:
            raise SpecError(f"--slurm-wait: {error}") from error
        by = slurm_trials(options=slurm or (), requeue=requeue, queue_s=queue_s, told=_tell)
    elif launcher == "command":
        by = command_trials(command=command, metrics=metrics)
    effort = Effort(trials=trials, steps=steps, parallel=parallel, repeats=repeats)
    with live_table(total=trials) as watcher:
        verified = api.verify(plan, effort=effort, resume=resume, watcher=watcher, by=by)
    print(verified.model_dump_json(indent=2) if as_json else verified_text(verified, folder=plan))
    if verified.winner is None:
        raise typer.Exit(1)


def _tell(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def _verify_placement(folder: Path, *, as_json: bool) -> None:
    from tuner.api import verify_place
    from tuner.cli.place_text import place_verified_text

    verified = verify_place(folder, budget_s=PLACEMENT_BUDGET_S)
    print(verified.model_dump_json(indent=2) if as_json else place_verified_text(verified))
