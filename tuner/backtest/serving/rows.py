"""A table of measured serving runs, line by line, as untrusted text.

A serving table is recognised by its columns of measured latencies. Cells stay text here;
launches.py parses them and names what is missing, row by row.
"""

import csv
import io
from pathlib import Path
from typing import Final

from tuner.backtest.rows import read_bytes, refuse_empty
from tuner.backtest.serving.launches import Cells
from tuner.errors import SpecError

MEASURED: Final = ("silicon_ttft_ms", "silicon_tpot_ms")
"""Columns that make a table one of serving runs."""
MOST_ROWS: Final = 200_000


def is_serving_table(path: Path) -> bool:
    """Whether the first line names the measured latencies.

    Raises:
        SpecError: the file is absent or too large.
    """
    first = read_bytes(path).partition(b"\n")[0]
    names = {name.strip() for name in first.decode("utf-8-sig", errors="replace").split(",")}
    return set(MEASURED) <= names


def read_cells(path: Path) -> tuple[Cells, ...]:
    """Read every row of a serving table.

    Raises:
        SpecError: the file is absent, too large, not UTF-8, no CSV or has no rows.
    """
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{str(path)!r}: byte {error.start} is not UTF-8; save the table as UTF-8 text"
        ) from error
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True, restval="")
    rows: list[Cells] = []
    try:
        for row in reader:
            if len(rows) >= MOST_ROWS:
                raise SpecError(f"{str(path)!r}: more than {MOST_ROWS} rows; split it")
            rows.append({name: cell for name, cell in row.items() if isinstance(name, str)})
    except csv.Error as error:
        raise SpecError(
            f"{str(path)!r}, line {reader.line_num}: {error}; write it as comma-separated values"
        ) from error
    refuse_empty(rows, path)
    return tuple(rows)
