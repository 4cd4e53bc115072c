"""`moetune report`: one page about a plan, for the meeting."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tuner.report.reading import Asked


class Format(StrEnum):
    """What is written."""

    HTML = "html"
    MD = "md"
    PNG = "png"


def command(
    plan: Annotated[Path, typer.Argument(help="Folder of a plan.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="File to write. Default: PLAN/report.html, .md, .png."),
    ] = None,
    written: Annotated[
        Format, typer.Option("--format", help="A page, Markdown, or the page as a picture.")
    ] = Format.HTML,
    with_what_if: Annotated[
        bool, typer.Option("--what-if/--no-what-if", help="Solve the plan under other limits too.")
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
    from tuner.output import write_files
    from tuner.report.reading import report_of
    from tuner.report.written import rendered, written_of

    limit_s = seconds(time_limit, option="--time-limit")
    asked = None
    if with_what_if:
        asked = _asked(
            plan, profiles=tuple(profile or ()), limit_s=limit_s, calibrated=not uncalibrated
        )
    report = report_of(plan, asked=asked)
    file = output or plan / f"report.{written.value}"
    content = rendered(report, kind=written.value)
    write_files(file.parent, {file.name: content})
    if as_json:
        told = written_of(report, kind=written.value, file=file, content=content)
        print(told.model_dump_json(indent=2))
    else:
        print(f"written: {file}")
    if not report.is_found:
        raise typer.Exit(1)


def _asked(
    folder: Path, *, profiles: tuple[Path, ...], limit_s: float, calibrated: bool
) -> "Asked | None":
    """Ask what other limits would change; None for a plan of a kind that has none."""
    from tuner.cli.progress import planning
    from tuner.explain.solving import what_ifs
    from tuner.plan_folder import kind_of_plan
    from tuner.report.reading import Asked
    from tuner.report.what_if_curves import QUESTIONS
    from tuner.what_if import parse_changes

    questions = QUESTIONS.get(kind_of_plan(folder) or "")
    if questions is None:
        return None
    changes = parse_changes(questions)
    with planning() as watch:
        found = what_ifs(
            folder,
            changes,
            profiles=profiles,
            time_limit_s=limit_s,
            calibrated=calibrated,
            watch=watch,
        )
    return Asked(changes=changes, found=found)
