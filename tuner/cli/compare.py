"""`moetune compare`: compare plans of one goal."""

from pathlib import Path
from typing import Annotated

import typer

from tuner.cli.text import print_exact, print_text


def command(
    plans: Annotated[
        list[Path],
        typer.Argument(
            metavar="PLAN PLAN...",
            help="Folders of two or more plans of one goal; the first is the reference.",
            show_default=False,
        ),
    ],
    csv: Annotated[
        Path | None,
        typer.Option("--csv", help="Write the figures to this file, a row a plan and figure."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare plans term by term.

    The verdict says which is better beyond the error band.
    """
    from tuner.cli.compare_text import comparison_text
    from tuner.explain.comparison import compare
    from tuner.output import write_csv

    comparison = compare(plans)
    if csv is not None:
        write_csv(csv, comparison.table())
    if as_json:
        print_exact(comparison.model_dump_json(indent=2))
        return
    print_text(comparison_text(comparison))
    if csv is not None:
        print_text(f"written: {csv}")
