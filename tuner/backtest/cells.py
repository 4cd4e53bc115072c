"""Cells of one row of a table of measurements, read as text and numbers."""

from collections.abc import Mapping
from typing import Final

BLANK: Final = ("", "0", "0.0")
"""Cells that mean that a number is not set."""

Cells = Mapping[str, str]


class MissingError(ValueError):
    """A row cannot be read or predicted; the message names what is missing or odd."""


def text_of(cells: Cells, name: str) -> str:
    """Return a cell's text.

    Raises:
        MissingError: it is blank.
    """
    value = cells.get(name, "").strip()
    if not value:
        raise MissingError(f"{name} is blank")
    return value


def number_of(cells: Cells, name: str) -> float:
    """Return a number above 0.

    Raises:
        MissingError: the cell holds none.
    """
    text = text_of(cells, name)
    try:
        value = float(text)
    except ValueError:
        raise MissingError(f"{name} {text[:40]!r} is not a number") from None
    if not 0.0 < value < 1e9:
        raise MissingError(f"{name} {text[:40]!r} is not above 0")
    return value


def optional_of(cells: Cells, name: str) -> float:
    """Return a number; blank: 0."""
    return 0.0 if cells.get(name, "").strip() in BLANK else number_of(cells, name)


def count_of(cells: Cells, name: str) -> int:
    """Return a whole number above 0.

    Raises:
        MissingError: the cell holds none.
    """
    value = number_of(cells, name)
    if value != int(value):
        raise MissingError(f"{name} {value:g} is not a whole number")
    return int(value)


def whole_of(cells: Cells, name: str, *, default: int) -> int:
    """Return a whole number, or a default where the cell is blank."""
    return default if cells.get(name, "").strip() in BLANK else count_of(cells, name)
