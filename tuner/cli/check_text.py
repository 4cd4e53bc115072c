"""What `moetune check` says: the table, and what CI systems read beside it."""

import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.text import columns, print_text, printable, tell

if TYPE_CHECKING:
    from tuner.regress.records import Check, ScenarioResult


def check_text(found: "Check") -> str:
    """Return a table of the scenarios and how many have which verdict."""
    rows = [
        (printable(one.name), one.verdict.value, printable(one.reason)) for one in found.scenarios
    ]
    counts = ", ".join(f"{count} {name}" for name, count in found.counts().items())
    lines = [columns(rows, header=("scenario", "verdict", "reason")), ""]
    if found.against:
        lines.append(f"against: {found.against}")
    lines += [f"wrote: {name}" for name in found.updated]
    lines.append(f"{'FAILED' if found.failed else 'passed'}: {counts}")
    return "\n".join(lines)


def print_table(found: "Check") -> None:
    """Print the table; where GitHub runs it, so that nothing in it is taken for a command.

    Names and reasons may hold what a pull request brings. `::stop-commands::WORD` until `::WORD::`
    is GitHub's own way (docs.github.com, "Workflow commands"), with a word that nobody can know.
    """
    if not _is_github():
        print_text(check_text(found))
        return
    word = secrets.token_hex(16)
    print_text(f"::stop-commands::{word}\n{check_text(found)}\n::{word}::")


def tell_ci(found: "Check") -> None:
    """Annotate the run and add to its summary where GitHub runs it."""
    from tuner.regress.annotations import annotations
    from tuner.regress.markdown import markdown

    if _is_github():
        # Both streams are read for commands; stdout may be JSON.
        for line in annotations(found):
            tell(line)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(markdown(found) + "\n")
        except OSError as error:  # the verdicts matter more than their summary
            tell(f"moetune: GITHUB_STEP_SUMMARY: {error.strerror}")


def tell_verdict(result: "ScenarioResult") -> None:
    """Tell a verdict on stderr as it is there, where a person watches."""
    if sys.stderr.isatty():
        line = f"{result.verdict.value:<12} {printable(result.name)}"
        tell(line)


def _is_github() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"
