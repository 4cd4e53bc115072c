"""Text that commands print, as tests read it."""

import re


def unwrapped(text: str) -> str:
    """Join the lines of every labelled statement."""
    return re.sub(r"\n {15,}", " ", text)


def flat(text: str) -> str:
    """Join all lines, with one space between words."""
    return " ".join(text.split())
