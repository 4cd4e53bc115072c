"""`moetune init`: prompt for the fields of a simple spec and write it, commented."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.goals import checked_goal, draft_of
from tuner.cli.options import SpecFlags, expanded
from tuner.cli.text import print_exact, print_stderr, print_text, quote_path
from tuner.errors import SpecError, TunerError

if TYPE_CHECKING:
    from tuner.draft.draft import Draft


@expanded
def command(
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the spec.")] = Path(
        "spec.yaml"
    ),
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="No prompts; use defaults for what is not given.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    flags: SpecFlags,
    as_json: Annotated[bool, typer.Option("--json", help="Print the spec as JSON too.")] = False,
) -> None:
    """Write a spec from a few prompts; every prompt is also a flag."""
    from tuner.draft.spec_file import draft_spec, fill_values
    from tuner.output import write_files
    from tuner.spec.spec_file import read_spec_keys

    if out.exists() and not force:
        raise TunerError(f"{out} exists already; add --force to replace it, or choose another -o")
    given = flags.given()
    if yes:
        draft = draft_of(flags.goal)
    else:
        draft, given = _prompt_for_values(flags.goal, given)
    text = draft_spec(draft, fill_values(draft, given), folder=out.absolute().parent)
    write_files(out.absolute().parent, {out.name: text}, option="-o")
    if as_json:
        print_exact(json.dumps(read_spec_keys(out), indent=2))
    else:
        print_text(f"written to {out}; next: moetune plan {quote_path(out)} -o PLAN")


def _prompt_for_values(
    goal: str | None, given: Mapping[str, str]
) -> "tuple[Draft, dict[str, str]]":
    """Prompt for what was not given, again after an unacceptable value.

    Raises:
        SpecError: this is no terminal, or the input ends.
    """
    from tuner.draft.spec_file import checked_value, default_value
    from tuner.goals.registry import GOALS

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise SpecError(
            "this is no terminal, so there are no prompts; give the values as flags and add --yes"
        )
    kind = None if goal is None else checked_goal(goal)
    while kind is None:
        try:
            kind = checked_goal(_prompt(f"goal: {', '.join(GOALS)}", next(iter(GOALS))))
        except SpecError as error:
            print_stderr(f"  {error}")
    values: dict[str, str] = {}
    draft = draft_of(kind)
    for field in draft.fields:
        text = given.get(field.key)
        while field.key not in values:
            if text is None and field.unless and values.get(field.unless):
                text = ""
            if text is None:
                text = _prompt(field.prompt, default_value(field, {**given, **values}))
            try:
                values[field.key] = checked_value(field, text, values)
            except SpecError as error:
                if field.key in given:
                    raise
                print_stderr(f"  {error}")
                text = None
    return draft, {**given, **values}


def _prompt(prompt: str, default: str | None) -> str:
    shown = f" [{default}]" if default else ""
    print_stderr(f"{prompt}{shown}: ", end="")
    line = sys.stdin.readline()
    if not line:
        raise SpecError("the input ended early; nothing was written")
    return line.strip() or default or ""
