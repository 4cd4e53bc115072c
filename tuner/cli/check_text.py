"""Output of `moetune check`: the table, and annotations for CI systems."""

import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.text import print_stderr, print_text, whole_text
from tuner.report.content import Paragraph, named, words_table
from tuner.report.printable import printable

if TYPE_CHECKING:
    from tuner.regress.records import Check, ScenarioResult


def check_text(check: "Check") -> str:
    """Return a table of the scenarios and the count of each verdict."""
    rows = (
        (scenario.name, scenario.verdict.value, scenario.reason) for scenario in check.scenarios
    )
    counts = ", ".join(f"{count} {name}" for name, count in check.counts().items())
    return whole_text(
        words_table("", ("scenario", "verdict", "reason"), rows),
        named(("against", check.against), *(("wrote", name) for name in check.updated)),
        Paragraph(text=f"{'FAILED' if check.failed else 'passed'}: {counts}"),
    )


def print_table(check: "Check") -> None:
    """Print the table; on GitHub, so that nothing in it is taken for a command.

    Names and reasons may contain text of a pull request. `::stop-commands::WORD` until `::WORD::`
    is GitHub's mechanism (docs.github.com, "Workflow commands"), with an unguessable word.
    """
    if not _is_github():
        print_text(check_text(check))
        return
    word = secrets.token_hex(16)
    print_text(f"::stop-commands::{word}\n{check_text(check)}\n::{word}::")


def annotate_ci(check: "Check") -> None:
    """Annotate the run and add to its summary on GitHub."""
    from tuner.regress.annotations import annotations
    from tuner.regress.markdown import markdown

    if _is_github():
        # Both streams are read for commands; stdout may be JSON.
        for line in annotations(check):
            print_stderr(line)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(markdown(check) + "\n")
        except OSError as error:  # the verdicts matter more than their summary
            print_stderr(f"moetune: GITHUB_STEP_SUMMARY: {error.strerror}")


def print_verdict(result: "ScenarioResult") -> None:
    """Print a verdict on stderr as soon as it is there, on a terminal only."""
    if sys.stderr.isatty():
        line = f"{result.verdict.value:<12} {printable(result.name)}"
        print_stderr(line)


def _is_github() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"
