"""Text that commands print, as tests read it."""

from collections.abc import Sequence

from tuner.cli.text import LABEL_WIDTH
from tuner.report.content import Depth, Report, Section
from tuner.report.terminal import Screen, report_text, sections_text


def words_of(report: Report | Sequence[Section], *, depth: Depth = Depth.MORE) -> str:
    """Return what the screens of a report, or of sections, say, on one line."""
    screen = Screen(width=10_000, depth=depth, is_whole=True)
    if isinstance(report, Report):
        return " ".join(report_text(report, screen).split())
    return " ".join(sections_text(report, screen).split())


def unwrapped(text: str) -> str:
    """Join the lines of every labelled statement."""
    return text.replace("\n" + " " * LABEL_WIDTH, " ")
