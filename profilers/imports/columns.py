"""Rows of a third-party table, from Parquet or from comma-separated text, plain or gzipped.

A table is data: it is read within limits, and nothing in it is executed. Text tables are read batch
by batch, so that a small file that unpacks to a huge one is refused before it fills the memory.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from profilers.errors import ProfileUnreadableError
from profilers.files import open_regular, require_regular
from profilers.out_of_memory import raise_lack_of_memory

Row = Mapping[str, Any]

SUFFIXES: Final = (".parquet", ".csv", ".csv.gz", ".txt")
POINTER: Final = b"version https://git-lfs"
"""How a file begins that git replaced by a note where the real one lies."""


def table_name(path: Path) -> str | None:
    """The name of the table in this file; nothing where it is no table."""
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if path.name.endswith(suffix):
            return path.name.removesuffix(suffix)
    return None


def read_rows(path: Path) -> list[Row]:
    """Read every row, in stored order.

    Raises:
        ProfileUnreadableError: the file is missing, damaged, too large or no such table.
    """
    import pyarrow as pa

    from profilers.parquet import MAX_FILE_BYTES

    try:
        require_regular(path, most_bytes=MAX_FILE_BYTES)
        with open_regular(path) as file:
            if file.read(len(POINTER)) == POINTER:
                raise ValueError("only a Git LFS pointer; fetch the file itself with git lfs pull")
        return _parquet(path) if path.suffix == ".parquet" else _text(path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise_lack_of_memory(error)
        reason = " ".join(str(error).split())[:200]
        raise ProfileUnreadableError(f"{path}: {reason}") from error


def _parquet(path: Path) -> list[Row]:
    from profilers.parquet import joined_texts, read_table

    rows: list[Row] = joined_texts(read_table(path)).to_pylist()
    return rows


def _text(path: Path) -> list[Row]:
    import pyarrow.csv

    from profilers.parquet import MAX_ROWS, MAX_UNPACKED_BYTES, require_unique

    rows: list[Row] = []
    unpacked = 0
    with pyarrow.csv.open_csv(path) as batches:
        require_unique(batches.schema.names)
        for batch in batches:
            unpacked += batch.nbytes
            if len(rows) + batch.num_rows > MAX_ROWS or unpacked > MAX_UNPACKED_BYTES:
                raise ValueError(f"more than {MAX_ROWS} rows or {MAX_UNPACKED_BYTES} bytes")
            rows += batch.to_pylist()
    return rows
