"""`moetune plan`: choose the configuration to launch, with a certificate, and write its files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tuner.cli.goals import PlanOptions, draft_of
from tuner.cli.options import SpecFlags, expanded
from tuner.cli.text import print_result, print_stderr
from tuner.errors import SpecError
from tuner.output import write_csv

FIRST_STAGES: Final = {
    "serve": ("planning", "pricing instances, solving, simulating the traffic"),
    "place": ("placing", "reading recordings, solving, evaluating hold-out passes"),
}
"""Stages that are shown of goals whose search tells no others."""


@expanded
def command(
    *,
    options: PlanOptions,
    flags: SpecFlags,
    spec: Annotated[
        Path | None,
        typer.Argument(
            help="The spec, a YAML file; without one, use the flags below.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Plan a training run, deployment or expert placement.

    The plan has a certificate: proven optimal under the model, or a bound and a gap.
    """
    from tuner.goals.registry import kind_or_first
    from tuner.spec.kind import goal_kind
    from tuner.spec.serving.llama_cpp import is_llama_cpp
    from tuner.spec.spec_file import read_spec_keys

    with _spec(spec, flags) as path:
        kind = kind_or_first(goal_kind(path))
        if kind == "serve" and is_llama_cpp(read_spec_keys(path)):
            from tuner.cli import llama_cpp

            llama_cpp.plan(path, options)
            return
        if options.solver is not None and kind != "train":
            raise SpecError(
                f"--solver {options.solver}: a plan of goal.kind {kind!r} solves no layout; leave"
                " it out"
            )
        from tuner.cli.plan_text import plan_text

        written = _written(path, kind, options)
        print_result(
            written,
            lambda plan: plan_text(plan, folder=options.out, verbose=options.verbose),
            as_json=options.as_json,
        )
        if options.csv is not None:
            write_csv(options.csv, written.candidates())
        if written.decision is None:
            raise typer.Exit(1)


def _written(path: Path, kind: str, options: PlanOptions) -> Any:
    """Plan a spec, write and return the plan."""
    from profilers.affinity import usable_cores
    from tuner.cli.progress import planning_progress
    from tuner.goals.registry import load_goal

    stage, text = FIRST_STAGES.get(kind, ("reading", ""))
    goal, known = load_goal(kind), signature(load_goal(kind).plan).parameters
    with planning_progress(stage, text=text, limit_s=options.time_limit_s) as watch:
        stated = {
            "profiles": tuple(options.profile or ()),
            "top": options.top,
            "time_limit_s": options.time_limit_s,
            "method": options.solver,
            "calibrated": not options.uncalibrated,
            "processes": len(usable_cores()),
            "watch": watch,
        }
        made = goal.plan(path, **{name: value for name, value in stated.items() if name in known})
    if options.solver is not None:
        print_stderr(made.plan.provenance.notes[0])
    return goal.write(options.out, made)


@contextmanager
def _spec(spec: Path | None, flags: SpecFlags) -> Iterator[Path]:
    """Give the spec's file: the one named, or one made from the flags.

    Raises:
        SpecError: there is neither, there are both, or the flags make no spec.
    """
    given = flags.given()
    if spec is not None:
        if given or flags.goal:
            first = next(iter(given), "goal")
            raise SpecError(
                f"--{first}: the spec {spec.name} sets it already; give one or the other"
            )
        yield spec
        return
    if not given and flags.goal is None:
        raise SpecError(
            "nothing to plan: name a SPEC (write one with `moetune init`), or give --model,"
            " --device and --devices"
        )
    from tuner.draft.spec_file import fill_values, temporary_spec

    draft = draft_of(flags.goal)
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
