"""Arrays of a recording as Parquet files.

An array of n axes is a table with one row for each place along its first n - 1 axes, in order: an
int64 column for each of them, and `values`, the numbers along the last axis.

A file is data: nothing in it is executed, and its shape must be the one that the caller expects.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from profilers.out_of_memory import raise_lack_of_memory
from profilers.parquet import read_table, to_numbers

MAX_FILE_BYTES: Final = 2**30
VALUES: Final = "values"


def write_array(path: Path, array: npt.NDArray[Any], *, axes: Sequence[str]) -> None:
    """Write an array, `axes` naming all of its axes but the last, and force it to the disk."""
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    values = pa.FixedSizeListArray.from_arrays(flat, array.shape[-1])
    columns = [pa.array(place) for place in _places(array.shape)]
    with path.open("wb") as file:
        table = pa.Table.from_arrays([*columns, values], names=[*axes, VALUES])
        pq.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())


def read_array(
    path: Path, *, axes: Sequence[str], shape: tuple[int, ...], dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    """Read an array of exactly that shape and type back.

    Raises:
        ValueError: the file is missing, damaged, too large, or no such table.
    """
    rows, values = math.prod(shape[:-1]), pa.list_(pa.from_numpy_dtype(dtype), shape[-1])
    wanted = pa.schema([*((name, pa.int64()) for name in axes), (VALUES, values)])

    def check(metadata: pq.FileMetaData, stored: pa.Schema) -> None:
        if metadata.num_rows != rows or not stored.equals(wanted):
            raise ValueError(
                f"{metadata.num_rows} rows, recording.json says {rows}; columns {_words(stored)},"
                f" must be {_words(wanted)}"
            )

    try:
        # Twice eight bytes a number: pages have headers and places of lists.
        table = read_table(
            path,
            check=check,
            most_bytes=MAX_FILE_BYTES,
            most_rows=rows,
            most_unpacked_bytes=2**20 + 16 * rows * (len(axes) + shape[-1]),
        )
        flat = pa.chunked_array([chunk.flatten() for chunk in table.column(VALUES).chunks])
        if flat.null_count or len(flat) != math.prod(shape):
            raise ValueError("a value is missing")
        for name, place in zip(axes, _places(shape), strict=True):
            if not np.array_equal(to_numbers(table.column(name)), place):
                raise ValueError(f"column {name!r} does not count its rows in order")
    except (pa.ArrowException, OSError) as error:
        raise_lack_of_memory(error)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(" ".join(reason.split())[:200]) from error
    # A copy: pyarrow's own memory is read-only, and goes when the table does.
    return np.array(to_numbers(flat), dtype=dtype).reshape(shape)


def _words(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name!r} is {field.type}" for field in schema)


def _places(shape: tuple[int, ...]) -> list[npt.NDArray[np.int64]]:
    return [axis.reshape(-1) for axis in np.indices(shape[:-1], dtype=np.int64)]
