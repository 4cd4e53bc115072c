"""`moetune calibrate`: fit residuals to measured runs, and report held-out errors."""

from pathlib import Path
from typing import Annotated

import typer

from tuner.cli.text import print_result


def command(
    profile: Annotated[
        str,
        typer.Argument(
            help="Stored profile of the device of the runs, or 'datasheets' for every device that "
            "ships with moetune.",
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
    """Fit residuals to measured runs, cross-validated by recipe.

    Serving runs give factors by engine and harness, cross-validated by model.
    """
    from tuner.backtest.serving.rows import is_serving_table

    if is_serving_table(runs):
        _serving(profile, runs, out, as_json=as_json)
        return
    from tuner.backtest.rows import read_rows
    from tuner.calibrate.stored import calibration_files, select_rows, write_calibration
    from tuner.cli.backtest_text import report_text
    from tuner.cli.progress import planning_progress

    with planning_progress("fitting", text=f"and cross-validating on {runs.name}"):
        made = calibration_files(profile, select_rows(read_rows(runs), profile=profile), runs=runs)
    write_calibration(out, made)
    print_result(made.report, report_text, as_json=as_json)


def _serving(profile: str, runs: Path, out: Path, *, as_json: bool) -> None:
    from tuner.calibrate.serving_stored import calibrate_serving
    from tuner.cli.backtest_text import calibration_text
    from tuner.cli.progress import planning_progress

    with planning_progress("fitting", text=f"and cross-validating on {runs.name}"):
        report = calibrate_serving(profile, runs, out)
    print_result(report, calibration_text, as_json=as_json)
