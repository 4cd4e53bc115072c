"""`moetune calibrate`: fit residuals to measured runs, and say how well they predict others."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    profile: Annotated[
        str,
        typer.Argument(
            help="Stored profile whose device was run on, or 'datasheets' for every device "
            "whose description ships.",
            show_default=False,
        ),
    ],
    runs: Annotated[
        Path,
        typer.Argument(
            help="Table of measured runs, CSV; 'moetune backtest --help' lists its columns.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Folder of the calibrated profile, or a file ending in .json."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit few physical constants to measured runs and cross-validate them by recipe."""
    from tuner.backtest.rows import read_rows
    from tuner.calibrate.stored import calibrated_files, selected, write_calibrated
    from tuner.cli.backtest_text import report_text

    made = calibrated_files(profile, selected(read_rows(runs), profile=profile), runs=runs)
    write_calibrated(out, made)
    print(made.report.model_dump_json(indent=2) if as_json else report_text(made.report))
