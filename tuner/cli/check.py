"""`moetune check`: plan stored scenarios again and compare with their accepted plans."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.text import print_exact
from tuner.errors import TunerError

if TYPE_CHECKING:
    from tuner.regress.checks import Manner


def command(
    checks: Annotated[
        Path | None,
        typer.Argument(help="Folder of scenarios, a folder each.", show_default=False),
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            help="A checkout of moetune, a folder of scenarios, or git:REV to compare with, instead"
            " of the accepted plans."
        ),
    ] = "",
    update: Annotated[
        bool, typer.Option("--update", help="Accept the new plans, and print what changes.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="A scenario by name; repeatable. Default: all.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A stored profile to compare with --baseline.")
    ] = None,
    baseline: Annotated[Path | None, typer.Option(help="An earlier stored profile.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a Markdown summary.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Scenarios in parallel; default: one per core."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Percent by which a prediction may change.")
    ] = 1.0,
    time_limit: Annotated[
        str,
        typer.Option(help="Solver time of a scenario, with its unit; killed at five times that."),
    ] = "120s",
    memory_limit: Annotated[
        str, typer.Option(help="Address space of one scenario, with its unit.")
    ] = "16GiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Plan stored scenarios again and report regressions.

    Verdicts: pass, better, drift, regression, incomparable, missing, error; exit code 1 on any of
    the last four. A scenario is a folder of CHECKS with spec.yaml, the
    accepted plan.json and, where it is not planned from datasheets, a stored profile in profile/.
    """
    from tuner.cli.check_text import annotate_ci, print_table, print_verdict
    from tuner.output import write_files
    from tuner.regress.check import check
    from tuner.regress.junit import junit_xml
    from tuner.regress.markdown import markdown as as_markdown

    if (profile is None) != (baseline is None):
        raise TunerError("--profile and --baseline belong together: give both, the new and the old")
    if checks is None and profile is None:
        raise TunerError("CHECKS is missing: moetune check FOLDER, or --profile NEW --baseline OLD")
    if update and (against or checks is None):
        raise TunerError("--update accepts plans of CHECKS as they are; leave --against out")

    result = check(
        checks,
        manner=_manner(tolerance, time_limit, memory_limit, jobs),
        against=against,
        update=update,
        only=tuple(only or ()),
        profiles=None if profile is None or baseline is None else (profile, baseline),
        on_result=print_verdict,
    )
    if as_json:
        print_exact(result.model_dump_json(indent=2))
    else:
        print_table(result)
    annotate_ci(result)
    for option, file, text in (
        ("--junit", junit, junit_xml),
        ("--markdown", markdown, as_markdown),
    ):
        if file is not None:
            write_files(file.parent, {file.name: text(result)}, option=option)
    if result.failed:
        raise typer.Exit(1)


def _manner(tolerance: float, time_limit: str, memory_limit: str, jobs: int | None) -> "Manner":
    from profilers.affinity import usable_cores
    from tuner.cli.options import seconds
    from tuner.regress.checks import Manner
    from tuner.regress.rules import Tolerance
    from tuner.regress.workers import Limits
    from tuner.units import parse_bytes

    solve_s = seconds(time_limit, option="--time-limit")
    try:
        memory_bytes = parse_bytes(memory_limit)
    except ValueError as error:
        raise TunerError(f"--memory-limit: {error}") from error
    ratio = tolerance / 100.0
    return Manner(
        tolerance=Tolerance(ratio=ratio, tie_ratio=max(ratio, Tolerance().tie_ratio)),
        limits=Limits(solve_s=solve_s, wall_s=5.0 * solve_s, memory_bytes=memory_bytes),
        workers=jobs or len(usable_cores()),
    )
