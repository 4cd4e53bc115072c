"""Command options and output for each goal: the modules train, serve and place beside this.

The options of the commands that have a function of each goal, plan, estimate and verify, are here
too: those modules take them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol, cast

import typer

from tuner.cli.options import VerboseFlag, seconds
from tuner.errors import SpecError

if TYPE_CHECKING:
    from tuner.draft.draft import Draft


UncalibratedFlag = Annotated[
    bool, typer.Option("--uncalibrated", help="Drop the residuals that ship with moetune.")
]
DEPLOYMENTS = "Serving plans"
BUDGET = "Budget"
LAUNCHERS = "Launchers"
SHARING = "Resume and parallel workers"
TRAINING_FORMATS: Final = "deepspeed, megatron, megatron-bridge, ms-swift, torchtitan or trainer"
"""Names of the formats' tables, which --help does not wait for; tests compare them."""
SERVING_FORMATS: Final = "sglang, trtllm or vllm"
METRICS: Final = "deepspeed, megatron, ms-swift, peft, torchtitan"


def _former(reason: str) -> Any:
    """Return an option that is read no more: it is refused in a line, with the reason."""

    def refuse(parameter: typer.CallbackParam, value: object) -> None:
        if value is not None:
            raise SpecError(f"{parameter.opts[0]} {value}: {reason}")

    return typer.Option(help="Former.", hidden=True, callback=refuse)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `moetune plan`."""

    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the plan.")]
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="Stored profile; repeatable, matched by device. Default: the spec's."),
    ] = None
    top: Annotated[int, typer.Option(min=1, help="Minimum number of decisions to return.")] = 5
    time_limit: Annotated[
        str,
        typer.Option(
            help="For the search, with its unit. Choosing among its results, relaxations and "
            "missing features add up to twice as much; several pools take up to six times in all; "
            "pricing adds some seconds."
        ),
    ] = "60s"
    solver: Annotated[
        str | None,
        typer.Option(hidden=True, help="Former choice of the solver of a layout."),
    ] = None
    uncalibrated: UncalibratedFlag = False
    csv: Annotated[
        Path | None,
        typer.Option(
            "--csv",
            help="Also write the candidates to this file; for a deployment the Pareto front of "
            "tokens/s per device and per user.",
        ),
    ] = None
    verbose: VerboseFlag = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False

    @property
    def time_limit_s(self) -> float:
        """Limit of the search."""
        return seconds(self.time_limit, option="--time-limit")


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions:
    """Options of `moetune estimate`."""

    launch: Annotated[
        str,
        typer.Option(
            "--launch",
            help="Launch file (shell script, arguments, YAML, TOML, JSON), or the command itself.",
        ),
    ]
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            help=f"{TRAINING_FORMATS} (default: by suffix and command); for a deployment "
            f"{SERVING_FORMATS} (default: by the command).",
        ),
    ] = None
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="Stored profile of accelerators; repeatable, matched by device. Default: the "
            "spec's."
        ),
    ] = None
    uncalibrated: UncalibratedFlag = False
    pool: Annotated[
        str | None, typer.Option(help="Deployment: the pool that the launch runs on.")
    ] = None
    instances: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Deployment: identical instances that share the traffic. Default: the replicas "
            "in Kubernetes manifests, else 1.",
        ),
    ] = None
    role: Annotated[
        str | None,
        typer.Option(
            help="Deployment whose file starts several servers: prefill, decode or aggregated, or "
            "the name of a group. Default: both, of one prefill and one decode group."
        ),
    ] = None
    log: Annotated[
        Path | None,
        typer.Option(help="Reinforcement learning: log of a run, whose phase timers are compared."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the estimate as JSON.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Options of `moetune verify`."""

    trials: Annotated[int, typer.Option(min=1, help="Total launches.")] = 8
    steps: Annotated[int, typer.Option(min=3, help="Timed steps per launch.")] = 8
    budget: Annotated[
        str,
        typer.Option(
            help="Wall time of all trials, e.g. 2h; none is started that would not end in time.",
            metavar="TIME",
            rich_help_panel=BUDGET,
        ),
    ] = ""
    max_devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most devices that trials may use at once; what needs more is launched smaller.",
            rich_help_panel=BUDGET,
        ),
    ] = None
    launcher: Annotated[
        Literal["local", "slurm", "command"],
        typer.Option(
            help="local: ranks on this machine; slurm: a job per trial; command: your launcher.",
            rich_help_panel=LAUNCHERS,
        ),
    ] = "local"
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            help="Option of sbatch, e.g. partition=gpu; repeatable.",
            metavar="NAME=VALUE",
            rich_help_panel=LAUNCHERS,
        ),
    ] = None
    slurm_wait: Annotated[
        str,
        typer.Option(
            help="How long a job may wait for its nodes.", metavar="TIME", rich_help_panel=LAUNCHERS
        ),
    ] = "24h"
    requeue: Annotated[
        bool,
        typer.Option(
            help="Requeue a job after a node failure or preemption.", rich_help_panel=LAUNCHERS
        ),
    ] = True
    parallel: Annotated[
        int,
        typer.Option(min=1, max=64, help="Slurm jobs in parallel.", rich_help_panel=LAUNCHERS),
    ] = 1
    command: Annotated[
        str,
        typer.Option(
            help="Your launcher, e.g. 'bash {launch}/run.sh --training.steps {steps}'.",
            rich_help_panel=LAUNCHERS,
        ),
    ] = ""
    network: Annotated[
        str | None,
        _former("trials share this machine's network; leave it out"),
    ] = None
    metrics: Annotated[
        str,
        typer.Option(
            help=f"Parser of its output: {METRICS}, jsonl (default) or"
            " regex:EXPRESSION with a group step_s; for a deployment, of the client: vllm-bench"
            " (default), sglang-bench or aiperf.",
            show_default=False,
            rich_help_panel=LAUNCHERS,
        ),
    ] = ""
    benchmark: Annotated[
        str,
        typer.Option(
            "--bench",
            help="Your benchmark client, e.g. 'python bench.py --url {url} --output {result}';"
            " default: the emitted benchmark.",
            rich_help_panel=DEPLOYMENTS,
        ),
    ] = ""
    url: Annotated[
        str,
        typer.Option(
            help="Address of the deployment; default: that of launch/local/local.sh.",
            rich_help_panel=DEPLOYMENTS,
        ),
    ] = ""
    health: Annotated[
        list[str] | None,
        typer.Option(
            help="Health endpoint; repeatable; default: URL/health.",
            metavar="URL",
            rich_help_panel=DEPLOYMENTS,
        ),
    ] = None
    runs: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Benchmark runs per launch.",
            rich_help_panel=DEPLOYMENTS,
        ),
    ] = 3
    start_limit: Annotated[
        str,
        typer.Option(
            help="Longest start-up of a deployment.",
            metavar="TIME",
            rich_help_panel=DEPLOYMENTS,
        ),
    ] = "30min"
    repeats: Annotated[
        int | None,
        _former(
            "ties are reported and not launched again; measure longer with --steps, or for a"
            " deployment with --runs"
        ),
    ] = None
    faults: Annotated[
        Path | None,
        _former(
            "verify makes no runs fail any more; `goal.reliability` forecasts failures, and"
            " examples/profiles/epyc-faults holds what runs through them took"
        ),
    ] = None
    resume: Annotated[
        bool,
        typer.Option(
            help="Keep finished trials and join running workers.",
            rich_help_panel=SHARING,
        ),
    ] = False
    storage: Annotated[
        str,
        typer.Option(
            help="Share trials through a database, postgresql://user@host/name (password in"
            " PGPASSWORD or ~/.pgpass); default: the plan's folder.",
            metavar="URL",
            rich_help_panel=SHARING,
        ),
    ] = ""
    as_json: Annotated[bool, typer.Option("--json", help="Print verified.json.")] = False


class GoalCommands(Protocol):
    """Implementation of the commands for one goal: a module of it beside this file."""

    VERIFY_OPTIONS: tuple[str, ...]
    """Options of `moetune verify` that plans of other goals do not have..."""
    PURPOSE: str
    """...and what they are for, in a refusal."""

    OTHER_LAUNCHER: str
    """Reason why trials are started here only, in a refusal; empty: by any launcher."""
    estimate: Callable[[Path, EstimateOptions], None]
    """Price a launch and print it. Exits with 1 where it cannot run."""
    verify: Callable[[Path, VerifyOptions], Any]
    """Launch the candidates of a plan's folder and return the conclusion."""


def commands_of(kind: str | None) -> GoalCommands:
    """Return the module of a goal; what is of no goal is refused where training is read."""
    from tuner.goals.registry import kind_or_first
    from tuner.spec.kind import ONLY_ESTIMATED

    name = kind if kind == ONLY_ESTIMATED else kind_or_first(kind)
    return cast(GoalCommands, import_module(f"tuner.cli.{name}"))


def draft_of(kind: str | None) -> "Draft":
    """Return the simple spec of a goal.

    Raises:
        SpecError: there is no such goal.
    """
    draft: Draft = import_module(f"tuner.draft.{checked_goal(kind)}").DRAFT
    return draft


def checked_goal(text: str | None) -> str:
    """Read the kind of a goal; the first there is where none is named.

    Raises:
        SpecError: none of them.
    """
    from tuner.errors import SpecError
    from tuner.goals.registry import GOALS, kind_or_first
    from tuner.spec.files import shown_value

    if text and text not in GOALS:
        raise SpecError(f"--goal: {shown_value(text)} is not one of {', '.join(GOALS)}")
    return kind_or_first(text)
