"""Columns of aiconfigurator's tables: Parquet, or comma-separated text, plain or gzipped.

A table is data: it is read within limits, and nothing in it is executed. Text tables are read batch
by batch, so that a small file that unpacks to a huge one is refused before it fills the memory.

Letters: N rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from profilers.arrays import Counts, Seconds, Texts
from profilers.errors import ProfileUnreadableError
from profilers.files import open_regular, require_regular
from profilers.out_of_memory import raise_lack_of_memory

SUFFIXES: Final = (".parquet", ".csv", ".csv.gz", ".txt")
POINTER: Final = b"version https://git-lfs"
"""First bytes of a file that Git LFS left as a pointer to the real one."""
TEXTS: Final = (
    *("device", "kernel_source", "op_name", "architecture", "phase", "distribution", "gemm_type"),
    *("backend", "implementation", "comm_backend"),
    *(f"{part}_dtype" for part in ("gemm", "attn", "kv_cache", "mla", "bmm", "moe", "nccl")),
    *("allreduce_dtype", "comm_dtype"),
)
"""Columns that are texts whatever they look like: `007` and `NA` are names."""
LONGEST_NAME: Final = 200
"""Characters of a dtype, distribution or library that are taken from a row."""
LONGEST_SHOWN: Final = 80
"""Characters of a value that a message repeats."""
LARGEST_COUNT: Final = 2.0**53
DTYPES: Final[Mapping[str, str]] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float": "fp32",
}
"""Our names of dtypes, by aiconfigurator's; others, such as fp8_block, keep their own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Words:
    """A column of texts, which repeat: W words, and the word of each row."""

    word_W: Texts
    word_of_N: Counts

    def __getitem__(self, rows: Counts) -> "Words":
        return Words(word_W=self.word_W, word_of_N=self.word_of_N[rows])

    def __len__(self) -> int:
        return len(self.word_of_N)

    @property
    def used_W(self) -> Counts:
        """Words that a row has."""
        return np.flatnonzero(np.bincount(self.word_of_N, minlength=len(self.word_W)))


Columns = Mapping[str, npt.NDArray[np.generic] | Words]


class OddRowError(ValueError):
    """A row holds a value that its column cannot."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


def table_name(path: Path) -> str | None:
    """The name of the table in this file; nothing where it is no table."""
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if path.name.endswith(suffix):
            return path.name.removesuffix(suffix)
    return None


def read_columns(file: Path) -> Columns:
    """Read a table within limits; a blank number is 0, and a blank text is empty.

    Raises:
        ProfileUnreadableError: it is missing, damaged, too large or no such table.
    """
    import pyarrow as pa

    from profilers.parquet import MAX_FILE_BYTES, read_table, to_numbers

    try:
        require_regular(file, most_bytes=MAX_FILE_BYTES)
        with open_regular(file) as start:
            if start.read(len(POINTER)) == POINTER:
                raise ValueError("only a Git LFS pointer; fetch the file itself with git lfs pull")
        table = read_table(file) if file.suffix == ".parquet" else _text_table(file)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise_lack_of_memory(error)
        reason = " ".join(str(error).split())[:200]
        raise ProfileUnreadableError(f"{file}: {reason}") from error
    by_column: dict[str, npt.NDArray[np.generic] | Words] = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if pa.types.is_dictionary(column.type):
            words = np.array([*column.dictionary.to_pylist(), ""], dtype=object)
            codes = to_numbers(column.indices.fill_null(len(words) - 1))
            by_column[name] = Words(word_W=words, word_of_N=codes)
        elif pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            by_column[name] = to_numbers(column.fill_null(0))
    return by_column


def _text_table(file: Path) -> Any:
    import pyarrow as pa
    import pyarrow.csv

    from profilers.parquet import MAX_ROWS, MAX_UNPACKED_BYTES, require_unique

    types = dict.fromkeys(TEXTS, pa.dictionary(pa.int32(), pa.string()))
    options = pyarrow.csv.ConvertOptions(column_types=types)
    kept, rows, unpacked = [], 0, 0
    with pyarrow.csv.open_csv(file, convert_options=options) as batches:
        require_unique(batches.schema.names)
        for batch in batches:
            rows, unpacked = rows + batch.num_rows, unpacked + batch.nbytes
            if rows > MAX_ROWS or unpacked > MAX_UNPACKED_BYTES:
                raise ValueError(f"more than {MAX_ROWS} rows or {MAX_UNPACKED_BYTES} bytes")
            kept.append(batch)
        return pa.Table.from_batches(kept, batches.schema).unify_dictionaries()


def num_rows(columns: Columns) -> int:
    """Rows of the table."""
    return len(next(iter(columns.values()), ()))


def numbers(columns: Columns, name: str) -> Seconds:
    """A column of any numbers.

    Raises:
        OddRowError: a cell is none.
    """
    values_N = columns[name]
    if isinstance(values_N, Words):
        raise OddRowError(0, f"{name} is {_shown(values_N)}, must be a number")
    _require(np.isfinite(values_N), values_N, f"{name} is {{}}, must be a number")
    return values_N.astype(np.float64)


def positive(columns: Columns, name: str) -> Seconds:
    """A column of numbers above 0.

    Raises:
        OddRowError: a cell is none.
    """
    values_N = numbers(columns, name)
    _require(values_N > 0.0, values_N, f"{name} is {{}}, must be positive")
    return values_N


def counts(columns: Columns, name: str, *, least: int = 1) -> Counts:
    """A column of whole numbers.

    Raises:
        OddRowError: a cell is none, or less than the least.
    """
    values_N = numbers(columns, name)
    is_whole_N = (values_N == np.floor(values_N)) & (values_N < LARGEST_COUNT)
    rule = f"{name} is {{}}, must be a whole number of at least {least}"
    _require(is_whole_N & (values_N >= least), values_N, rule)
    return values_N.astype(np.int64)


def optional_counts(columns: Columns, name: str) -> Counts:
    """A column that not every release has; 0 where it is absent or blank."""
    if name in columns:
        return counts(columns, name, least=0)
    return np.zeros(num_rows(columns), dtype=np.int64)


def texts(columns: Columns, name: str, word: Callable[[str], str] = str) -> Texts:
    """A column of short texts, each by a function that is called once for each word.

    Raises:
        OddRowError: a cell is none, or the function raises a ValueError.
    """
    cells_N = columns[name]
    if not isinstance(cells_N, Words):
        raise OddRowError(0, f"{name} is {_shown(cells_N)}, must be a short text")
    word_W = cells_N.word_W.copy()
    for at in cells_N.used_W:
        try:
            if not isinstance(word_W[at], str) or not 0 < len(word_W[at]) <= LONGEST_NAME:
                raise ValueError(f"{name} is {_shown(word_W[at:])}, must be a short text")
            word_W[at] = word(word_W[at])
        except ValueError as error:
            raise OddRowError(int(np.argmax(cells_N.word_of_N == at)), str(error)) from error
    return word_W[cells_N.word_of_N]


def cells(columns: Columns, name: str) -> list[str]:
    """A column as short texts, whatever it holds; all are empty where it is absent."""
    column = columns.get(name)
    if column is None:
        return [""] * num_rows(columns)
    values_N = column.word_W[column.word_of_N] if isinstance(column, Words) else column
    return [str(cell)[:LONGEST_NAME] for cell in values_N.tolist()]


def dtypes(columns: Columns, name: str) -> Texts:
    """Types by our names."""
    return texts(columns, name, lambda text: DTYPES.get(text, text))


def stored_types(columns: Columns, dtype_N: Texts) -> Texts:
    """Return `kv_` and the type of stored keys and values; empty if computed in that type."""
    stored_N = dtypes(columns, "kv_cache_dtype")
    return np.where(stored_N == dtype_N, "", "kv_" + stored_N).astype(object)


def joined(*parts: Texts) -> Texts:
    """Words with strokes between, empty ones left out."""
    rows = list(zip(*(part.tolist() for part in parts), strict=True))
    name_of = {row: "/".join(word for word in row if word) for row in set(rows)}
    return np.array([name_of[row] for row in rows], dtype=object)


def same(columns: Columns, text: str) -> Texts:
    """One word for every row."""
    return np.full(num_rows(columns), text, dtype=object)


def _require(is_right_N: npt.NDArray[np.bool_], values_N: npt.NDArray[Any], rule: str) -> None:
    if not is_right_N.all():
        row = int(np.argmin(is_right_N))
        raise OddRowError(row, rule.format(_shown(values_N[row:])))


def _shown(column: npt.NDArray[Any] | Words) -> str:
    """Quote the first cell of a column, no longer than needed."""
    values = column.word_W[column.word_of_N[:1]] if isinstance(column, Words) else column[:1]
    return repr("".join(map(str, values))[:LONGEST_SHOWN])
