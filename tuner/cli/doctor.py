"""`moetune doctor`: what is installed, what is missing and the command that installs it."""

from typing import TYPE_CHECKING, Annotated

import typer

from tuner.cli.text import print_result, whole_text

if TYPE_CHECKING:
    from tuner.cli.printed import Doctor


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check what is installed, and how to install what is missing."""
    from tuner.cli import environment
    from tuner.cli.printed import Doctor

    findings = environment.examine()
    usable = all(finding.status == "ok" for finding in findings if finding.core)
    print_result(Doctor(usable=usable, findings=findings), _text, as_json=as_json)
    if not usable:
        raise typer.Exit(3)


def _text(result: "Doctor") -> str:
    from tuner.report.content import named

    found = (
        (finding.name, f"{finding.status:<9}{finding.found}".rstrip())
        for finding in result.findings
    )
    # A command is to be copied, so its line is not wrapped.
    lacking = (
        f"\n\n{finding.name}: {finding.costs}\n    {finding.remedy}"
        for finding in result.findings
        if finding.status != "ok"
    )
    return whole_text(named(*found)) + "".join(lacking)
