"""Text that commands print, as tests read it."""

import re
from collections.abc import Sequence

from tuner.report.content import Depth, Report, Section
from tuner.report.terminal import Screen, blocks_text, report_text


def words_of(report: Report | Sequence[Section], *, depth: Depth = Depth.MORE) -> str:
    """Return what the screens of a report, or of sections, say, on one line."""
    screen = Screen(width=10_000, depth=depth, is_whole=True)
    if isinstance(report, Report):
        return flat(report_text(report, screen))
    return flat(blocks_text(report, screen))


def unwrapped(text: str) -> str:
    """Join the lines of every labelled statement."""
    return re.sub(r"\n {15,}", " ", text)


def flat(text: str) -> str:
    """Join all lines, with one space between words."""
    return " ".join(text.split())
