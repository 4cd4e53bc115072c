"""Text that commands print, as tests read it."""

import re

from tuner.report.content import Depth, Report
from tuner.report.terminal import Screen, report_text


def words_of(report: Report, *, depth: Depth = Depth.MORE) -> str:
    """Return what the screens of a report say, on one line."""
    return flat(report_text(report, Screen(width=10_000, depth=depth, is_whole=True)))


def unwrapped(text: str) -> str:
    """Join the lines of every labelled statement."""
    return re.sub(r"\n {15,}", " ", text)


def flat(text: str) -> str:
    """Join all lines, with one space between words."""
    return " ".join(text.split())
