"""`moetune plan`: choose the configuration to launch, with a certificate, and write its files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tuner.cli import options
from tuner.cli.text import print_stderr
from tuner.errors import SpecError


def command(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the plan.")],
    spec: Annotated[
        Path | None,
        typer.Argument(
            help="The spec, a YAML file; without one, use the flags below.",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="Stored profile; repeatable, matched by device. Default: the spec's."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Minimum number of decisions to return.")] = 5,
    time_limit: Annotated[
        str,
        typer.Option(
            help="For the search, with its unit. Choosing among its results, relaxations and "
            "missing features add up to twice as much; several pools take up to six times in all; "
            "pricing adds some seconds."
        ),
    ] = "60s",
    solver: Annotated[str, typer.Option(help="milp (CBC), cp_sat or exact.")] = "milp",
    uncalibrated: Annotated[
        bool, typer.Option("--uncalibrated", help="Drop the residuals that ship with moetune.")
    ] = False,
    csv: Annotated[
        Path | None,
        typer.Option(
            "--csv",
            help="Also write the candidates to this file; for a deployment the Pareto front of "
            "tokens/s per device and per user.",
        ),
    ] = None,
    verbose: options.VerboseFlag = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    goal: options.GoalFlag = None,
    model: options.ModelFlag = None,
    device: options.DeviceFlag = None,
    devices: options.DevicesFlag = None,
    sequence_length: options.SequenceFlag = None,
    batch: options.BatchFlag = None,
    precision: options.PrecisionFlag = None,
    engine: options.EngineFlag = None,
    concurrency: options.ConcurrencyFlag = None,
    rate: options.RateFlag = None,
    input_tokens: options.InputFlag = None,
    output_tokens: options.OutputFlag = None,
    ttft: options.TtftFlag = None,
    tpot: options.TpotFlag = None,
    quantization: options.QuantizationFlag = None,
    objective: options.ObjectiveFlag = None,
    workload: options.WorkloadFlag = None,
    ranks: options.RanksFlag = None,
    ranks_per_node: options.RanksPerNodeFlag = None,
    redundant_experts: options.RedundantFlag = None,
    emit: options.EmitFlag = None,
) -> None:
    """Plan a training run, deployment or expert placement.

    The plan has a certificate: proven optimal under the model, or a bound and a gap.
    """
    from tuner.cli.goals import PlanOptions, commands_of
    from tuner.spec.kind import goal_kind

    chosen = PlanOptions(
        out=out,
        profiles=tuple(profile or ()),
        top=top,
        time_limit_s=options.seconds(time_limit, option="--time-limit"),
        method=solver,
        calibrated=not uncalibrated,
        verbose=verbose,
        as_json=as_json,
    )
    with _spec(spec, goal, context.params) as path:
        written = commands_of(goal_kind(path)).plan(path, chosen)
        if csv is not None:
            _write_csv(csv, written)
        if written.decision is None:
            raise typer.Exit(1)


def _write_csv(file: Path, written: Any) -> None:
    from tuner.goals.registry import goal_of
    from tuner.output import write_files

    write_files(file.parent, {file.name: goal_of(written).csv(written)}, option="--csv")


@contextmanager
def _spec(spec: Path | None, goal: str | None, params: dict[str, Any]) -> Iterator[Path]:
    """Give the spec's file: the one named, or one made from the flags.

    Raises:
        SpecError: there is neither, there are both, or the flags make no spec.
    """
    given = options.given_flags(params)
    if spec is not None:
        if given or goal:
            first = next(iter(given), "goal")
            raise SpecError(
                f"--{first}: the spec {spec.name} sets it already; give one or the other"
            )
        yield spec
        return
    if not given and goal is None:
        raise SpecError(
            "nothing to plan: name a SPEC (write one with `moetune init`), or give --model,"
            " --device and --devices"
        )
    from tuner.cli.goals import draft_of
    from tuner.draft.spec_file import fill_values, temporary_spec

    draft = draft_of(goal)
    values = fill_values(draft, given)
    taken = [f"--{key} {text}" for key, text in values.items() if text and key not in given]
    with temporary_spec(draft, values) as path:
        try:
            yield path
        except typer.Exit:
            _say_taken(taken)
            raise
    # Not after a refusal, which is a single line.
    _say_taken(taken)


def _say_taken(taken: Sequence[str]) -> None:
    if taken:
        print_stderr(f"defaults used: {' '.join(taken)}")
