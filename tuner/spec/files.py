"""Reading small text files that a user named, with one-line refusals."""

import stat
from pathlib import Path
from typing import Any, Final

from tuner.errors import SpecError

LARGEST_FILE_BYTES: Final = 1_000_000
"""Specs, model configs and routing records are small; a larger file is something else."""

_LONGEST_SHOWN: Final = 60


def shown_path(path: Path) -> str:
    """Write a path on one line, whatever characters it holds."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(path))


def shown_value(value: Any) -> str:
    """Write a value on one line, cut where it is long."""
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 100:
        return "a number of more than 30 digits"
    text = {True: "true", False: "false", None: "null"}.get(value) if _is_word(value) else None
    text = repr(value) if text is None else text
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def one_line(text: str) -> str:
    """Join the lines of a library's message."""
    return " ".join(text.split())


def read_small_text(path: Path, *, what: str) -> str:
    """Read a UTF-8 text file (a byte-order mark is dropped) of at most 1 MB.

    Raises:
        SpecError: the path is no readable regular file, too large, or not UTF-8.
    """
    shown = shown_path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SpecError(f"{shown}: not a file; name the file that holds the {what}")
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError(f"{shown}: cannot read the {what}: {reason}") from error
    if len(content) > LARGEST_FILE_BYTES:
        raise SpecError(f"{shown}: larger than {LARGEST_FILE_BYTES} bytes, so it is not a {what}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{shown}: not UTF-8 text (byte {error.start}), so it is not a {what}"
        ) from error
