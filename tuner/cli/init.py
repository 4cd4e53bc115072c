"""`moetune init`: ask the few questions, and write a commented spec that `moetune plan` accepts."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli import options
from tuner.cli.text import print_exact, print_text, tell
from tuner.errors import SpecError, TunerError

if TYPE_CHECKING:
    from tuner.draft.questions import Goal


def command(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the spec.")] = Path(
        "spec.yaml"
    ),
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing; take defaults for what is not given.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the spec as JSON too.")] = False,
) -> None:
    """Write a spec from a few answers; every answer is also a flag."""
    from tuner.draft.questions import checked_goal
    from tuner.draft.spec_file import answered, draft
    from tuner.output import write_files
    from tuner.spec.spec_file import parsed_spec

    if out.exists() and not force:
        raise TunerError(f"{out} exists already; add --force to replace it, or choose another -o")
    given = options.given_flags(context.params)
    if yes:
        kind = checked_goal(goal or "train")
    else:
        kind, given = _asked(goal, given)
    text = draft(kind, answered(kind, given), folder=out.absolute().parent)
    write_files(out.absolute().parent, {out.name: text}, option="-o")
    if as_json:
        print_exact(json.dumps(parsed_spec(out), indent=2))
    else:
        print_text(f"written to {out}; next: moetune plan {out} -o PLAN")


def _asked(goal: str | None, given: Mapping[str, str]) -> "tuple[Goal, dict[str, str]]":
    """Ask what was not given, and again after an answer that cannot be.

    Raises:
        SpecError: this is no terminal, or the answers end.
    """
    from tuner.draft.questions import GOALS, checked_goal, questions_of
    from tuner.draft.spec_file import checked, default_of

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise SpecError(
            "this is no terminal, so nothing can be asked; give the answers as flags and add --yes"
        )
    kind = None if goal is None else checked_goal(goal)
    while kind is None:
        try:
            kind = checked_goal(_answer(f"what is planned: {', '.join(GOALS)}", "train"))
        except SpecError as error:
            tell(f"  {error}")
    answers: dict[str, str] = {}
    for question in questions_of(kind):
        text = given.get(question.key)
        while question.key not in answers:
            if text is None and question.unless and answers.get(question.unless):
                text = ""
            if text is None:
                text = _answer(question.asks, default_of(question, {**given, **answers}))
            try:
                answers[question.key] = checked(question, text, answers)
            except SpecError as error:
                if question.key in given:
                    raise
                tell(f"  {error}")
                text = None
    return kind, {**given, **answers}


def _answer(asks: str, default: str | None) -> str:
    shown = f" [{default}]" if default else ""
    tell(f"{asks}{shown}: ", end="")
    line = sys.stdin.readline()
    if not line:
        raise SpecError("the answers ended early; nothing was written")
    return line.strip() or default or ""
