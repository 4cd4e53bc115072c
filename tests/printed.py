"""Text that commands print, as tests read it."""

from tuner.cli.text import LABEL_WIDTH


def unwrapped(text: str) -> str:
    """Join the lines of every labelled statement."""
    return text.replace("\n" + " " * LABEL_WIDTH, " ")
