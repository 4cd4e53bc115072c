"""`moetune report`: one page about a plan, for the meeting."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tuner.cli import options
from tuner.cli.text import print_exact, print_text


class Format(StrEnum):
    """What is written."""

    HTML = "html"
    MD = "md"
    PNG = "png"
    CSV = "csv"


def command(
    plan: options.PlanArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="File to write. Default: PLAN/report.html, .md, .png, .csv."
        ),
    ] = None,
    written: Annotated[
        Format,
        typer.Option(
            "--format", help="A page, Markdown, the page as a picture, or its tables as CSV."
        ),
    ] = Format.HTML,
    with_what_if: Annotated[
        bool,
        typer.Option(
            "--what-if/--no-what-if",
            help="Solve the plan under other limits too, and play a deployment's traffic again.",
        ),
    ] = True,
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="As given to plan; a training plan holds its own copies."),
    ] = None,
    time_limit: Annotated[
        str, typer.Option(help="For all searches of --what-if together, with its unit.")
    ] = "60s",
    uncalibrated: Annotated[bool, typer.Option("--uncalibrated", help="As given to plan.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was written as JSON.")
    ] = False,
) -> None:
    """Write a page about a plan: what to launch, what to expect, how sure that is, and why.

    The page is one file and needs no network. Each limit of `--what-if` is solved anew.
    """
    from tuner.cli.options import seconds
    from tuner.cli.progress import planning
    from tuner.output import write_files
    from tuner.report.written import rendered, written_of
    from tuner.report_api import report as report_on

    limit_s = seconds(time_limit, option="--time-limit")
    with planning() as watch:
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
        told = written_of(report, kind=written.value, file=file, content=content)
        print_exact(told.model_dump_json(indent=2))
    else:
        print_text(f"written: {file}")
    if not report.is_found:
        raise typer.Exit(1)
