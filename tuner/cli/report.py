"""`moetune report`: a one-page report on a plan."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from tuner.cli import options
from tuner.cli.text import print_exact, print_text
from tuner.errors import TunerError


class ReportFormat(StrEnum):
    """Format of the report."""

    HTML = "html"
    MD = "md"
    PNG = "png"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise TunerError(
            f"--format {value!r}: a report is html, md or png; candidates become a table with"
            " moetune plan --csv FILE"
        )


def command(
    plan: options.PlanArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="File to write. Default: PLAN/report.html, .md or .png."
        ),
    ] = None,
    written: Annotated[
        ReportFormat,
        typer.Option(
            "--format",
            help="A page, Markdown, or the page as a picture.",
            parser=ReportFormat,
            metavar="[html|md|png]",
        ),
    ] = ReportFormat.HTML,
    with_what_if: Annotated[
        bool,
        typer.Option(
            "--what-if/--no-what-if",
            help="Also solve what-ifs, and simulate a deployment's traffic again.",
        ),
    ] = True,
    profile: options.ProfilesOption = None,
    time_limit: options.WhatIfTimeOption = "60s",
    uncalibrated: options.UncalibratedFlag = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written as JSON.")
    ] = False,
) -> None:
    """Write a one-page report on a plan.

    The page says what to launch, what to expect, the error bands, and why. It is one file and needs
    no network.
    """
    from tuner.cli.options import seconds
    from tuner.cli.progress import planning_progress
    from tuner.explain.report import report as report_on
    from tuner.output import write_files
    from tuner.report.written import describe_file, rendered

    limit_s = seconds(time_limit, option="--time-limit")
    with planning_progress() as watch:
        report = report_on(
            plan,
            with_what_if=with_what_if,
            profiles=tuple(profile or ()),
            time_limit_s=limit_s,
            calibrated=not uncalibrated,
            watch=watch,
        )
    file = output or plan / f"report.{written.value}"
    content = rendered(report, kind=written.value)
    write_files(file.parent, {file.name: content}, option="-o")
    if as_json:
        summary = describe_file(report, kind=written.value, file=file, content=content)
        print_exact(summary.model_dump_json(indent=2))
    else:
        print_text(f"written: {file}")
    if not report.is_found:
        raise typer.Exit(1)
