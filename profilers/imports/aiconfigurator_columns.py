"""Columns of aiconfigurator's Parquet tables, mapped to the names of our tables.

Letters: N rows.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from profilers.arrays import Counts, Texts
from profilers.errors import ProfileUnreadableError
from profilers.imports.aiconfigurator_tables import DTYPES
from profilers.out_of_memory import raise_lack_of_memory

Columns = Mapping[str, npt.NDArray[np.generic]]


def read_columns(file: Path) -> Columns:
    """Read a table within limits; texts repeat, so that they are kept as words.

    Raises:
        ProfileUnreadableError: it is damaged or too large.
    """
    import pyarrow as pa

    from profilers.parquet import read_table

    try:
        table = read_table(file)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise_lack_of_memory(error)
        reason = " ".join(str(error).split())[:200]
        raise ProfileUnreadableError(f"{file}: {reason}") from error
    by_column: dict[str, npt.NDArray[np.generic]] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if pa.types.is_dictionary(column.type):
            words = np.array([*column.dictionary.to_pylist(), ""], dtype=object)
            codes = column.indices.fill_null(len(words) - 1).to_numpy(zero_copy_only=False)
            by_column[name] = words[codes]
        elif pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            by_column[name] = column.fill_null(0).to_numpy(zero_copy_only=False)
    return by_column


def num_rows(columns: Columns) -> int:
    """Rows of the table."""
    return len(next(iter(columns.values()), ()))


def numbers(columns: Columns, name: str) -> npt.NDArray[np.float64]:
    """A column of any numbers."""
    return np.asarray(columns[name], dtype=np.float64)


def counts(columns: Columns, name: str) -> Counts:
    """A column of whole numbers.

    Raises:
        ValueError: with the name, where one is not.
    """
    values = numbers(columns, name)
    if not (np.isfinite(values).all() and (values == np.floor(values)).all()):
        raise ValueError(repr(name))
    return values.astype(np.int64)


def optional_counts(columns: Columns, name: str) -> Counts:
    """A column that not every release has; 0 where it is absent."""
    if name in columns:
        return counts(columns, name)
    return np.zeros(num_rows(columns), dtype=np.int64)


def dtypes(columns: Columns, name: str) -> Texts:
    """Types by our names."""
    return renamed(columns[name], lambda text: DTYPES.get(text, text))


def renamed(texts: npt.NDArray[np.generic], name: Callable[[str], str]) -> Texts:
    """Words by a function, called once for each."""
    words = texts.tolist()
    name_of = {word: name(str(word)) for word in set(words)}
    return np.array([name_of[word] for word in words], dtype=object)


def joined(*parts: Texts) -> Texts:
    """Words with strokes between, empty ones left out."""
    rows = list(zip(*(part.tolist() for part in parts), strict=True))
    name_of = {row: "/".join(word for word in row if word) for row in set(rows)}
    return np.array([name_of[row] for row in rows], dtype=object)


def holds_part(texts: npt.NDArray[np.generic], part: str) -> npt.NDArray[np.bool_]:
    """Which words contain a part."""
    words = texts.tolist()
    holds = {word: part in str(word) for word in set(words)}
    return np.array([holds[word] for word in words], dtype=np.bool_)


def every_row(columns: Columns) -> npt.NDArray[np.bool_]:
    """All of them."""
    return np.ones(num_rows(columns), dtype=np.bool_)


def same(columns: Columns, text: str) -> Texts:
    """One word for every row."""
    return np.full(num_rows(columns), text, dtype=object)


def stored_types(columns: Columns, dtype_N: Texts) -> Texts:
    """What keys and values are stored as, where it is not what the kernel computes in."""
    stored_N = dtypes(columns, "kv_cache_dtype")
    return np.where(stored_N == dtype_N, "", "kv_" + stored_N).astype(object)
