"""`moetune calibrate`: fit to measured runs, or to a server's logs, and report held-out errors."""

from pathlib import Path
from typing import Annotated

import typer

from tuner.cli.text import print_result
from tuner.errors import SpecError


def command(
    profile: Annotated[
        str,
        typer.Argument(
            metavar="PROFILE|SPEC",
            help="Stored profile of the device of the runs, or 'datasheets' for every device that "
            "ships with moetune; with --launch the spec, a YAML file.",
            show_default=False,
        ),
    ],
    runs: Annotated[
        Path | None,
        typer.Argument(
            help="Table of measured runs, CSV; 'moetune backtest --help' lists its columns.",
            show_default=False,
        ),
    ] = None,
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", help="Folder of the calibrated profile, or a file ending in .json."
        ),
    ],
    launch: Annotated[
        str | None,
        typer.Option("--launch", help="Server that runs: its launch file, or the command itself."),
    ] = None,
    observed: Annotated[
        list[Path] | None,
        typer.Option(
            "--observed",
            help="Log of that server; repeatable. Steps: vLLM's log with "
            "--enable-logging-iteration-details, forward-pass metrics as JSON lines. Requests: "
            "vllm bench serve --save-detailed, AIPerf's profile_export.jsonl, SGLang's "
            "--export-metrics-to-file, or a CSV of arrival, input, output, ttft, end. To check: "
            "Prometheus scrapes.",
        ),
    ] = None,
    profiles: Annotated[
        list[Path] | None,
        typer.Option("--profile", help="With --launch: stored profile, as of moetune plan."),
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="With --launch: the pool that the server runs on.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit residuals to measured runs, cross-validated by recipe.

    Serving runs give factors by engine and harness, cross-validated by model. With --launch the
    steps of a server are corrected by its logs; plan and estimate use the folder as --profile.
    """
    if launch is not None or observed:
        if launch is None or not observed or runs is not None:
            raise SpecError(
                "a server's logs need --launch with its command, and --observed with each log, in"
                " the place of a table of runs"
            )
        from tuner.cli.backtest_text import server_text
        from tuner.cli.progress import planning_progress
        from tuner.goals.serve_calibration import calibrate_server

        with planning_progress("fitting", text="corrections to the server's logs"):
            made = calibrate_server(
                profile,
                launch=launch,
                observed=observed,
                out=out,
                profiles=profiles or (),
                pool=pool,
            )
        print_result(made, server_text, as_json=as_json)
        return
    if runs is None:
        raise SpecError(
            "give a table of measured runs, or --launch and --observed of a running server"
        )
    from tuner.backtest.serving.rows import is_serving_table

    if is_serving_table(runs):
        _serving(profile, runs, out, as_json=as_json)
        return
    from tuner.backtest.rows import read_rows
    from tuner.calibrate.stored import calibration_files, select_rows, write_calibration
    from tuner.cli.backtest_text import report_text
    from tuner.cli.progress import planning_progress

    with planning_progress("fitting", text=f"and cross-validating on {runs.name}"):
        fitted = calibration_files(
            profile, select_rows(read_rows(runs), profile=profile), runs=runs
        )
    write_calibration(out, fitted)
    print_result(fitted.report, report_text, as_json=as_json)


def _serving(profile: str, runs: Path, out: Path, *, as_json: bool) -> None:
    from tuner.calibrate.serving_stored import calibrate_serving
    from tuner.cli.backtest_text import calibration_text
    from tuner.cli.progress import planning_progress

    with planning_progress("fitting", text=f"and cross-validating on {runs.name}"):
        report = calibrate_serving(profile, runs, out)
    print_result(report, calibration_text, as_json=as_json)
