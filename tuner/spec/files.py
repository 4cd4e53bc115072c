"""Reading small text files that a user named, with one-line refusals."""

import json
import os
from pathlib import Path
from typing import Any, Final

from profilers.files import NotRegularError, TooLargeError, read_bounded
from tuner.errors import SpecError

LARGEST_FILE_BYTES: Final = 1_000_000
"""Largest spec or model config, bytes."""

_LONGEST_SHOWN: Final = 60


def shown_path(path: Path) -> str:
    """Format a path on one line, with any characters in it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(path))


def home_expanded(path: str | Path) -> Path:
    """Expand a leading ~ or ~user; other names that begin with ~ stay unchanged.

    `Path.expanduser` raises for users that do not exist.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises


def shown_value(value: Any) -> str:
    """Format a value on one line, truncated."""
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


def read_small_text(path: Path, *, what: str, most_bytes: int = LARGEST_FILE_BYTES) -> str:
    """Read a UTF-8 text file (a byte-order mark is dropped) of a bounded size.

    Raises:
        SpecError: the path is no readable regular file, too large, or not UTF-8.
    """
    shown = shown_path(path)
    try:
        content = read_bounded(path, most_bytes=most_bytes)
    except (IsADirectoryError, NotRegularError) as error:
        raise SpecError(f"{shown}: not a file; name the file that holds the {what}") from error
    except TooLargeError as error:
        raise SpecError(
            f"{shown}: larger than {most_bytes} bytes, so it is not a {what}"
        ) from error
    except OSError as error:
        raise SpecError(f"{shown}: cannot read the {what}: {error.strerror}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{shown}: not UTF-8 text (byte {error.start}), so it is not a {what}"
        ) from error


def read_json_object(
    path: Path, *, what: str, most_bytes: int = LARGEST_FILE_BYTES
) -> dict[str, Any]:
    """Read a JSON file that holds an object; of duplicate keys the last one counts.

    Raises:
        SpecError: unreadable, not JSON, nested too deeply, or not an object.
    """
    shown = shown_path(path)
    text = read_small_text(path, what=what, most_bytes=most_bytes)
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise SpecError(f"{shown}: nested too deeply for a {what}") from error
    except ValueError as error:
        raise SpecError(one_line(f"{shown}: not valid JSON: {error}")) from error
    if not isinstance(values, dict):
        raise SpecError(f"{shown}: {shown_value(values)} at the top, where an object belongs")
    return values
