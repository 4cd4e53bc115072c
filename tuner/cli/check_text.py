"""What `moetune check` says: the table, and what CI systems read beside it."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.cli.text import columns

if TYPE_CHECKING:
    from tuner.regress.records import Check, ScenarioResult


def check_text(found: "Check") -> str:
    """Return a table of the scenarios and how many have which verdict."""
    rows = [(one.name, one.verdict.value, one.reason) for one in found.scenarios]
    counts = ", ".join(f"{count} {name}" for name, count in found.counts().items())
    lines = [columns(rows, header=("scenario", "verdict", "reason")), ""]
    if found.against:
        lines.append(f"against: {found.against}")
    lines += [f"wrote: {name}" for name in found.updated]
    lines.append(f"{'FAILED' if found.failed else 'passed'}: {counts}")
    return "\n".join(lines)


def tell_ci(found: "Check") -> None:
    """Annotate the run and add to its summary where GitHub runs it."""
    from tuner.regress.annotations import annotations
    from tuner.regress.markdown import markdown

    if os.environ.get("GITHUB_ACTIONS") == "true":
        # Both streams are read for commands; stdout may be JSON.
        for line in annotations(found):
            print(line, file=sys.stderr)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(markdown(found) + "\n")


def tell(result: "ScenarioResult") -> None:
    """Tell a verdict on stderr as it is there, where a person watches."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"{result.verdict.value:<12} {result.name}", file=sys.stderr, flush=True)
