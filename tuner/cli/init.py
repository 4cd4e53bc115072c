"""`moetune init`: write a simple spec from flags, commented."""

import json
from pathlib import Path
from typing import Annotated

import typer

from tuner.cli.goals import draft_of
from tuner.cli.options import SpecFlags, expanded
from tuner.cli.text import print_exact, print_text, quote_path
from tuner.errors import TunerError


@expanded
def command(
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the spec.")] = Path(
        "spec.yaml"
    ),
    yes: Annotated[
        bool, typer.Option("--yes", "-y", hidden=True, help="Former: there are no prompts.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    flags: SpecFlags,
    as_json: Annotated[bool, typer.Option("--json", help="Print the spec as JSON too.")] = False,
) -> None:
    """Write a spec from flags, with defaults for what is not given."""
    from tuner.draft.spec_file import draft_spec, fill_values
    from tuner.output import write_files
    from tuner.spec.spec_file import read_spec_keys

    if out.exists() and not force:
        raise TunerError(f"{out} exists already; add --force to replace it, or choose another -o")
    del yes
    draft = draft_of(flags.goal)
    text = draft_spec(draft, fill_values(draft, flags.given()), folder=out.absolute().parent)
    write_files(out.absolute().parent, {out.name: text}, option="-o")
    if as_json:
        print_exact(json.dumps(read_spec_keys(out), indent=2))
    else:
        print_text(f"written to {out}; next: moetune plan {quote_path(out)} -o PLAN")
