"""Text without characters that control a terminal (escapes, tabs, direction marks); lists cut."""

from collections.abc import Sequence
from typing import Final

MOST_LISTED: Final = 40
"""Names of a list that are printed; JSON has all."""


def printable(text: str) -> str:
    """Escape every character that controls a terminal, newlines included."""
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def shortened(words: Sequence[str]) -> str:
    """Return a list in one text, with its first words where it is long."""
    more = len(words) - MOST_LISTED
    return ", ".join(words[:MOST_LISTED]) + (f" and {more:,} more" if more > 0 else "")
