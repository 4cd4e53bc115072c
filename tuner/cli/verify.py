"""`moetune verify`: launch a plan's candidates for a few steps each and choose by measurement."""

from typing import Annotated, Literal

import typer

from tuner.cli import options
from tuner.cli.verify_options import refuse_unfit, written_options

LauncherName = Literal["local", "slurm", "command"]
NetworkName = Literal["own", "host"]
DEPLOYMENTS = "Serving plans"
BUDGET = "Budget"
LAUNCHERS = "Launchers"
SHARING = "Resume and parallel workers"


def command(
    context: typer.Context,
    plan: options.PlanArgument,
    trials: Annotated[int, typer.Option(min=1, help="Total launches.")] = 8,
    steps: Annotated[int, typer.Option(min=3, help="Timed steps per launch.")] = 8,
    budget: Annotated[
        str,
        typer.Option(
            help="Wall time of all trials, e.g. 2h; smaller jobs may replace full-scale ones.",
            metavar="TIME",
            rich_help_panel=BUDGET,
        ),
    ] = "",
    max_devices: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most devices that trials may use at once.", rich_help_panel=BUDGET
        ),
    ] = None,
    launcher: Annotated[
        LauncherName,
        typer.Option(
            help="local: ranks on this machine; slurm: a job per trial; command: your launcher.",
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
            help="Requeue a job after a node failure or preemption.", rich_help_panel=LAUNCHERS
        ),
    ] = True,
    parallel: Annotated[
        int,
        typer.Option(min=1, max=64, help="Slurm jobs in parallel.", rich_help_panel=LAUNCHERS),
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
            help="Network of trials that stay on this machine: own (a namespace with loopback only,"
            " where possible) or host, for programs that download.",
            rich_help_panel=LAUNCHERS,
        ),
    ] = "own",
    metrics: Annotated[
        str,
        typer.Option(
            help="Parser of its output: megatron, torchtitan, deepspeed, jsonl (default) or"
            " regex:EXPRESSION with a group step_s; for a deployment, of the client: vllm-bench"
            " (default), sglang-bench or aiperf.",
            show_default=False,
            rich_help_panel=LAUNCHERS,
        ),
    ] = "",
    benchmark: Annotated[
        str,
        typer.Option(
            "--bench",
            help="Your benchmark client, e.g. 'python bench.py --url {url} --output {result}';"
            " default: the emitted benchmark.",
            rich_help_panel=DEPLOYMENTS,
        ),
    ] = "",
    url: Annotated[
        str,
        typer.Option(
            help="Address of the deployment; default: that of launch/local/local.sh.",
            rich_help_panel=DEPLOYMENTS,
        ),
    ] = "",
    health: Annotated[
        list[str] | None,
        typer.Option(
            help="Health endpoint; repeatable; default: URL/health.",
            metavar="URL",
            rich_help_panel=DEPLOYMENTS,
        ),
    ] = None,
    runs: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Benchmark runs per launch.",
            rich_help_panel=DEPLOYMENTS,
        ),
    ] = 3,
    start_limit: Annotated[
        str,
        typer.Option(
            help="Longest start-up of a deployment.",
            metavar="TIME",
            rich_help_panel=DEPLOYMENTS,
        ),
    ] = "30min",
    repeats: Annotated[
        int, typer.Option(min=0, max=16, help="Repeats of the two fastest while they tie.")
    ] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            help="Keep finished trials and join running workers.",
            rich_help_panel=SHARING,
        ),
    ] = False,
    storage: Annotated[
        str,
        typer.Option(
            help="Share trials through a database, postgresql://user@host/name (password in"
            " PGPASSWORD or ~/.pgpass); default: the plan's folder.",
            metavar="URL",
            rich_help_panel=SHARING,
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print verified.json.")] = False,
) -> None:
    """Launch a plan's candidates and recalibrate.

    The launch files are rewritten for the fastest.
    """
    from tuner.cli.goals import VerifyOptions, commands_of
    from tuner.goals.registry import goal_of_folder

    kind = goal_of_folder(plan).kind
    refuse_unfit(written_options(context), kind=kind, launcher=launcher, parallel=parallel)
    chosen = VerifyOptions(
        trials=trials,
        steps=steps,
        budget=budget,
        max_devices=max_devices,
        launcher=launcher,
        slurm=tuple(slurm or ()),
        slurm_wait=slurm_wait,
        requeue=requeue,
        parallel=parallel,
        command=command,
        network=network,
        metrics=metrics,
        benchmark=benchmark,
        url=url,
        health=tuple(health or ()),
        runs=runs,
        start_limit=start_limit,
        repeats=repeats,
        resume=resume,
        storage=storage,
        as_json=as_json,
    )
    commands_of(kind).verify(plan, chosen)
