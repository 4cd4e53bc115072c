"""A table of measured serving runs, line by line, as untrusted text.

A serving table is recognised by its columns of measured latencies. Cells stay text here;
launches.py parses them and names what is missing, row by row.
"""

from pathlib import Path
from typing import Final

from tuner.backtest.cells import Cells
from tuner.backtest.rows import has_columns, read_lines

MEASURED: Final = ("silicon_ttft_ms", "silicon_tpot_ms")
"""Columns that make a table one of serving runs."""


def is_serving_table(path: Path) -> bool:
    """Return whether the first line names the measured latencies.

    Raises:
        SpecError: the file is absent or too large.
    """
    return has_columns(path, MEASURED)


def read_cells(path: Path) -> tuple[Cells, ...]:
    """Read every row of a serving table; what a short line lacks is blank.

    Raises:
        SpecError: the file is absent, too large, not UTF-8, no CSV or has no rows.
    """
    lines = read_lines(path)
    header = next(lines)
    blank = [""] * len(header)
    return tuple(dict(zip(header, [*cells, *blank], strict=False)) for cells in lines)
