"""`moetune doctor`: what is installed, what is missing and the command that installs it."""

from typing import Annotated

import typer

from tuner.cli.text import columns, print_exact, print_text


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check what is installed, and how to install what is missing."""
    from tuner.cli.environment import examine

    findings = examine()
    lacking = [finding for finding in findings if finding.status != "ok"]
    usable = not any(finding.core for finding in lacking)
    if as_json:
        from tuner.cli.printed import Doctor

        print_exact(Doctor(usable=usable, findings=findings).model_dump_json(indent=2))
    else:
        print_text(columns([(each.name, each.status, each.found) for each in findings]))
        for finding in lacking:
            print_text(f"\n{finding.name}: {finding.costs}\n    {finding.remedy}")
    if not usable:
        raise typer.Exit(3)
