"""A table whose columns cannot be told apart is refused by every reader of tables."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from profilers.errors import ProfileUnreadableError
from profilers.imports import aiconfigurator_columns
from profilers.tables import read_columns, read_parquet


def test_a_repeated_column_is_one_line(tmp_path: Path) -> None:
    table = pa.table({"kind": ["a"], "m": [1]})
    file = tmp_path / "gemm.parquet"
    pq.write_table(table.append_column("m", table["m"]), file)
    text = tmp_path / "gemm.csv"
    text.write_text("kind,m,m\na,1,2\n")
    readers: list[Callable[[], object]] = [
        lambda: read_parquet(file, operation="gemm", expected_rows=1),
        lambda: read_columns(file, operation="gemm", expected_rows=1),
        lambda: aiconfigurator_columns.read_columns(file),
        lambda: aiconfigurator_columns.read_columns(text),
    ]
    for read in readers:
        with pytest.raises(ProfileUnreadableError, match="column 'm' occurs 2 times; keep one"):
            read()
