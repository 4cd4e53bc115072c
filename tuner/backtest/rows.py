"""Reads a table of published training runs, one row a run.

The file is untrusted and often incomplete: cells may be blank, columns missing or unknown. A cell
that is no number, or an impossible one, invalidates only its own row, which is kept with the reason
and counted. A file that is unusable as a whole (no known column, not text, too large) is one error.

Memory is bounded by `LARGEST_BYTES`, beyond which no file is read, and `MOST_ROWS`.
"""

import csv
import hashlib
import io
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from profilers.files import TooLargeError, read_bounded
from tuner.backtest.layout import (
    COLUMNS,
    COUNTS,
    FALSE,
    FLAGS,
    OPTIONAL_COUNTS,
    QUANTITIES,
    TRUE,
)
from tuner.errors import SpecError

LARGEST_BYTES: Final = 64 * 2**20
MOST_ROWS: Final = 200_000
LONGEST_SHOWN: Final = 40
"""Characters of a bad cell that a reason quotes."""
LARGEST_COUNT: Final = 1e9

Architecture = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run; what is blank is absent."""

    number: int
    """Line of the table, counted from 1 without the header."""
    texts: Mapping[str, str]
    numbers: Mapping[str, float]
    flags: Mapping[str, bool]
    architecture: Architecture = field(default_factory=dict)
    """Contents of `arch_json`."""
    reason: str = ""
    """Reason why the row cannot be used; empty where it can."""

    def text(self, column: str) -> str:
        """Return a cell of text, empty where it is blank."""
        return self.texts.get(column, "")

    def number_or(self, column: str, default: float) -> float:
        """Return a cell that is a number, or the default where it is blank."""
        return self.numbers.get(column, default)

    @property
    def id(self) -> str:
        """Name of the row, its number where none is given."""
        return self.text("id") or f"row-{self.number}"

    @property
    def source(self) -> str:
        """Publication of the row; errors are reported by it."""
        return self.text("source") or "unstated"

    @property
    def group(self) -> str:
        """The recipe, which cross-validation keeps together; without one each row is its own."""
        return self.text("group") or self.id

    @property
    def has_run_out_of_memory(self) -> bool:
        """The run was tried and did not fit."""
        return self.text("status").lower() == "out_of_memory"


def read_rows(path: Path) -> tuple[Row, ...]:
    """Read every row of a table in the layout of `COLUMNS`.

    Raises:
        SpecError: the file is absent, too large, not UTF-8, no CSV, or has no row or no column
            that we know.
    """
    lines = read_lines(path)
    header = next(lines)
    _check_header(header, path)
    return tuple(parse_row(header, cells, number=at) for at, cells in enumerate(lines, start=1))


def read_lines(path: Path) -> Iterator[list[str]]:
    """Yield the names of a table's columns, then the cells of each row.

    Python's reader, as those of Arrow and pandas drop a row of too many cells, or refuse all for
    it, and Arrow's takes a quote that is never closed for one cell.

    Raises:
        SpecError: the file is absent, too large, not UTF-8, no CSV, or has no rows.
    """
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    number = 0
    try:
        yield [name.strip() for name in next(reader, [])]
        for number, cells in enumerate(filter(None, reader), start=1):
            if number > MOST_ROWS:
                raise SpecError(f"{str(path)!r}: more than {MOST_ROWS} rows; split it")
            yield cells
    except csv.Error as error:
        raise SpecError(
            f"{str(path)!r}, line {reader.line_num}: {error}; write it as comma-separated values"
        ) from error
    if not number:
        raise SpecError(
            f"{str(path)!r}: no rows below the header; add one line per measured run, with the "
            "columns of 'moetune backtest --help'"
        )


def read_bytes(path: Path) -> bytes:
    """Read a table whole.

    Raises:
        SpecError: it is absent or too large.
    """
    try:
        return read_bounded(path, most_bytes=LARGEST_BYTES)
    except TooLargeError as error:
        raise SpecError(
            f"{str(path)!r} is larger than {LARGEST_BYTES // 2**20} MiB; split it into smaller ones"
        ) from error
    except OSError as error:
        raise SpecError(f"cannot read {str(path)!r}: {error.strerror}") from error


def has_columns(path: Path, columns: Collection[str]) -> bool:
    """Return whether the first line of a table names all these columns.

    Raises:
        SpecError: the file is absent or too large.
    """
    first = read_bytes(path).partition(b"\n")[0]
    names = {name.strip() for name in first.decode("utf-8-sig", errors="replace").split(",")}
    return set(columns) <= names


def table_digest(path: Path) -> str:
    """Return the SHA-256 of a table.

    Raises:
        SpecError: it is absent or too large.
    """
    return hashlib.sha256(read_bytes(path)).hexdigest()


def _text(path: Path) -> str:
    data = read_bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{str(path)!r}: byte {error.start} is not UTF-8; save the table as UTF-8 text"
        ) from error


def _check_header(header: Sequence[str], path: Path) -> None:
    if not set(header) & set(COLUMNS):
        raise SpecError(
            f"{str(path)!r}: the first line names none of the columns that are known; "
            "see 'moetune backtest --help'"
        )
    twice = next((name for name in header if name in COLUMNS and header.count(name) > 1), None)
    if twice is not None:
        raise SpecError(f"{str(path)!r}: column {twice!r} appears twice; remove one")


def parse_row(header: Sequence[str], cells: Sequence[str], *, number: int) -> Row:
    """Parse one line; an error becomes its reason."""
    known = {
        name: cell.strip()
        for name, cell in zip(header, cells, strict=False)
        if name in COLUMNS and cell.strip()
    }
    numbers: dict[str, float] = {}
    flags: dict[str, bool] = {}
    architecture: Architecture = {}
    reason = ""
    if len(cells) > len(header):
        reason = f"{len(cells)} cells under {len(header)} columns"
    try:
        for name, text in known.items():
            if name in COUNTS or name in OPTIONAL_COUNTS or name in QUANTITIES:
                numbers[name] = _number(name, text)
            elif name in FLAGS:
                flags[name] = _flag(name, text)
            elif name == "arch_json":
                architecture = parse_architecture(text)
    except ValueError as error:
        reason = reason or str(error)
    return Row(
        number=number,
        texts={
            name: text
            for name, text in known.items()
            if name not in (*COUNTS, *OPTIONAL_COUNTS, *QUANTITIES, *FLAGS, "arch_json")
        },
        numbers=numbers,
        flags=flags,
        architecture=architecture,
        reason=reason,
    )


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name} {_shown(text)} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{name} {_shown(text)} is not finite")
    if name in QUANTITIES:
        if value <= 0.0:
            raise ValueError(f"{name} {_shown(text)} is not above 0")
        return value
    least = 0.0 if name in OPTIONAL_COUNTS else 1.0
    if value != math.floor(value) or not least <= value <= LARGEST_COUNT:
        raise ValueError(f"{name} {_shown(text)} is not a whole number from {least:g} on")
    return value


def _flag(name: str, text: str) -> bool:
    lowered = text.lower()
    if lowered not in (*TRUE, *FALSE):
        raise ValueError(f"{name} {_shown(text)} is neither true nor false")
    return lowered in TRUE


def parse_architecture(text: str) -> Architecture:
    """Read one cell of `arch_json`.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        architecture = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise ValueError(f"arch_json {_shown(text)} is not JSON") from None
    if not isinstance(architecture, dict):
        raise ValueError(f"arch_json {_shown(text)} is not a JSON object")  # noqa: TRY004 bad input
    return architecture


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _shown(text: str) -> str:
    """Quote a cell on one line and no longer than needed."""
    plain = re.sub(r"\s+", " ", text)
    return repr(plain if len(plain) <= LONGEST_SHOWN else plain[: LONGEST_SHOWN - 3] + "...")
