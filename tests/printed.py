"""Text that commands print, as tests read it."""

from tuner.cli.text import LABEL_WIDTH
from tuner.report.content import Depth, Report
from tuner.report.terminal import Screen, report_text


def words_of(report: Report, *, depth: Depth = Depth.MORE) -> str:
    """Return what the screens of a report say, on one line."""
    return " ".join(report_text(report, Screen(width=10_000, depth=depth, is_whole=True)).split())


def unwrapped(text: str) -> str:
    """Join the lines of every labelled statement."""
    return text.replace("\n" + " " * LABEL_WIDTH, " ")
