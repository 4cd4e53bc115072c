"""Parquet files of others, read within bounds on what they decode to.

A kilobyte can stand for gigabytes: a value that repeats in a list takes no room, and neither does
a row whose text stands in a dictionary. So values are counted in the metadata before any is read,
and texts are read as words and numbers of words, whose length is summed before they are joined.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from profilers.files import require_regular

MAX_FILE_BYTES: Final = 256 * 2**20
MAX_UNPACKED_BYTES: Final = 1024 * 2**20
MAX_ROWS: Final = 2_000_000
_VALUE_BYTES: Final = 8
"""Bytes of a number, or what bounds them."""


def read_table(
    path: Path,
    *,
    check: Callable[[pq.FileMetaData, pa.Schema], None] = lambda _metadata, _schema: None,
    most_bytes: int = MAX_FILE_BYTES,
    most_rows: int = MAX_ROWS,
    most_unpacked_bytes: int = MAX_UNPACKED_BYTES,
) -> pa.Table:
    """Read a table whose columns are numbers, texts, or lists of numbers.

    Args:
        path: the file.
        check: raises ValueError for a table that is not wanted, before anything is read.
        most_bytes: largest size of the file.
        most_rows: the same of its rows.
        most_unpacked_bytes: the same of what it decodes to.

    Returns:
        The table; its texts are dictionaries (words, and the word of each row).

    Raises:
        ValueError: it is larger, has two columns of one name or texts within lists, or `check` says
            so.
        OSError: it cannot be read.
        pa.ArrowException: it is damaged.
    """
    require_regular(path, most_bytes=most_bytes)
    metadata = pq.read_metadata(path)
    check(metadata, metadata.schema.to_arrow_schema())
    require_unique(metadata.schema.to_arrow_schema().names)
    texts = list(_texts(metadata))
    unpacked = max(
        sum(metadata.row_group(at).total_byte_size for at in range(metadata.num_row_groups)),
        sum(_decoded_bytes(metadata)),
    )
    if metadata.num_rows > most_rows or unpacked > most_unpacked_bytes:
        raise ValueError(f"{metadata.num_rows} rows of {unpacked} bytes are too many")
    with pq.ParquetFile(path, read_dictionary=texts) as file:
        table = file.read(use_threads=False)
    length = sum(_text_bytes(chunk) for name in texts for chunk in table[name].chunks)
    if length > most_unpacked_bytes:
        raise ValueError(f"{metadata.num_rows} rows with {length} bytes of text are too many")
    return table


def joined_texts(table: pa.Table) -> pa.Table:
    """Return a table with its dictionaries as plain texts."""
    for at, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            plain = table[field.name].cast(field.type.value_type)
            table = table.set_column(at, field.name, plain)
    return table


def to_numbers(column: pa.Array | pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a column of numbers as an array that cannot be written to.

    Without blanks this takes no `to_numpy`, which imports pandas: half a second, in which a Ctrl-C
    is lost.
    """
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    numbers: npt.NDArray[Any] = (
        whole.to_numpy(zero_copy_only=False) if whole.null_count else np.from_dlpack(whole)
    )
    return numbers


def require_unique(names: Sequence[str]) -> None:
    """Refuse duplicate columns.

    Raises:
        ValueError: a name occurs twice.
    """
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise ValueError(f"column {twice[0]!r} occurs {names.count(twice[0])} times; keep one")


def _texts(metadata: pq.FileMetaData) -> Iterator[str]:
    """Yield the columns of text, or bytes.

    Raises:
        ValueError: they lie within lists or structures, so that their length is not known before
            they are read.
    """
    for at in range(metadata.num_columns):
        column = metadata.schema.column(at)
        if column.physical_type == "BYTE_ARRAY":
            if column.path != column.name:
                raise ValueError(f"column {column.path!r} holds texts within, which is not read")
            yield column.name


def _decoded_bytes(metadata: pq.FileMetaData) -> Iterator[int]:
    """Yield the bytes of every column of numbers, and of the texts' numbers of words."""
    for group in (metadata.row_group(at) for at in range(metadata.num_row_groups)):
        for at in range(group.num_columns):
            width = max(metadata.schema.column(at).length, _VALUE_BYTES)
            yield width * group.column(at).num_values


def _text_bytes(chunk: pa.DictionaryArray) -> int:
    """Return the bytes of all texts of a chunk once every row has its own."""
    if not pa.types.is_dictionary(chunk.type):
        raise ValueError(f"a column is {chunk.type}, which is not read")
    lengths = pc.binary_length(chunk.dictionary)
    return pc.sum(lengths.take(chunk.indices)).as_py() or 0
