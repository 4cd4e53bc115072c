"""Rows of one operation as a Parquet file; written and validated.

Columns: kind, dtype, direction, one int64 per axis of the operation, status, error, source, rank,
times_s (list of double). A file is data: nothing in it is ever executed, and every row passes the
same validation as a row that was just measured.

Not covered: where the file lies and whether it agrees with the header; see profilers/store.py.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import ValidationError

from profilers.errors import ProfileUnreadableError, first_problem
from profilers.out_of_memory import raise_lack_of_memory
from profilers.parquet import joined_texts, read_table, require_unique, to_numbers
from profilers.records import AXES, Case, Measurement, MeasurementStatus, Source

if TYPE_CHECKING:
    from pandas import DataFrame


def write_parquet(path: Path, rows: Sequence[Measurement], *, operation: str) -> None:
    """Write the rows of one operation and force them to the disk."""
    with path.open("wb") as file:
        pq.write_table(_stored(rows, operation=operation), file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())


def case_table(rows: Iterable[Measurement], *, operation: str) -> "DataFrame":
    """Return the rows of one operation as a data frame, with the medians of their repeats.

    Raises:
        ValueError: there is no such operation.
    """
    if operation not in AXES:
        raise ValueError(f"{operation!r} is not one of {', '.join(AXES)}")
    table_rows = [row for row in rows if row.case.operation == operation]
    table: DataFrame = _stored(table_rows, operation=operation).to_pandas()
    return table.assign(median_s=[row.median_s if row.times_s else math.nan for row in table_rows])


def read_parquet(
    path: Path, *, operation: str, expected_rows: int | None
) -> tuple[Measurement, ...]:
    """Read the rows back, in stored order; None expects any number of them.

    Raises:
        ProfileUnreadableError: the file is missing, damaged, too large, or not such a table.
    """
    try:
        table = _table(path, operation=operation, expected_rows=expected_rows)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise_lack_of_memory(error)
        raise ProfileUnreadableError(f"{path}: {_one_line(error)}; measure it again") from error
    rows = []
    for number, flat in enumerate(table.to_pylist()):
        try:
            rows.append(_measurement(flat, operation=operation))
        except ValidationError as error:
            reason = first_problem(error)
            raise ProfileUnreadableError(f"{path}: row {number}: {reason}") from error
    return tuple(rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Rows that succeeded, column by column; N of them."""

    kind_N: npt.NDArray[np.object_]
    dtype_N: npt.NDArray[np.object_]
    axes_N: dict[str, npt.NDArray[np.int64]]
    time_s_N: npt.NDArray[np.float64]
    """Medians of the repeats."""
    source: Source
    """Origin that most rows share."""


def read_columns(path: Path, *, operation: str, expected_rows: int) -> Columns:
    """Read a table without making records of its rows; forward passes only.

    Raises:
        ProfileUnreadableError: the file is missing, damaged, too large, or not such a table.
    """
    import pandas  # noqa: F401 - by pyarrow's scalars, which would lose a Ctrl-C in it

    try:
        table = _table(path, operation=operation, expected_rows=expected_rows)
        forward = pc.is_in(table["direction"], value_set=pa.array(["forward", ""]))
        table = table.filter(
            pc.and_(pc.equal(table["status"], MeasurementStatus.OK.value), forward)
        )
        lengths = to_numbers(pc.list_value_length(table["times_s"])).astype(np.int64)
        if table.num_rows and lengths.min() < 1:
            raise ValueError("a row has no repeat")
        sources = pc.value_counts(table["source"]).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise_lack_of_memory(error)
        raise ProfileUnreadableError(f"{path}: {_one_line(error)}; measure it again") from error
    flat = to_numbers(table["times_s"].combine_chunks().flatten())
    row_T = np.repeat(np.arange(table.num_rows), lengths)
    flat = flat[np.lexsort((flat, row_T))]
    start_N = np.concatenate(([0], np.cumsum(lengths)))[:-1] if table.num_rows else lengths
    middle_s_N = 0.5 * (flat[start_N + (lengths - 1) // 2] + flat[start_N + lengths // 2])
    main_source = max(
        sources, key=lambda entry: entry["counts"], default={"values": Source.MEASURED}
    )
    return Columns(
        kind_N=np.array(table["kind"].to_pylist(), dtype=object),
        dtype_N=np.array(table["dtype"].to_pylist(), dtype=object),
        axes_N={axis: to_numbers(table[axis]) for axis in AXES[operation]},
        time_s_N=middle_s_N,
        source=Source(main_source["values"]),
    )


def _table(path: Path, *, operation: str, expected_rows: int | None) -> pa.Table:
    def check(meta: pq.FileMetaData, stored: pa.Schema) -> None:
        if expected_rows is not None and meta.num_rows != expected_rows:
            raise ValueError(f"{meta.num_rows} rows, profile.json says {expected_rows}")
        wanted = _schema(operation)
        require_unique(stored.names)
        if missing := [name for name in wanted.names if name not in stored.names]:
            raise ValueError(f"column {missing[0]!r} is missing")
        if surplus := [name for name in stored.names if name not in wanted.names]:
            raise ValueError(f"column {surplus[0]!r} does not belong there")
        for field in wanted:
            if (kind := stored.field(field.name).type) != field.type:
                raise ValueError(f"column {field.name!r} is {kind}, must be {field.type}")

    return joined_texts(read_table(path, check=check))


def _stored(rows: Iterable[Measurement], *, operation: str) -> pa.Table:
    return pa.Table.from_pylist([_flat(row) for row in rows], schema=_schema(operation))


def _schema(operation: str) -> pa.Schema:
    texts = [(name, pa.string()) for name in ("kind", "dtype", "direction")]
    axes = [(axis, pa.int64()) for axis in AXES[operation]]
    outcome = [(name, pa.string()) for name in ("status", "error", "source")]
    return pa.schema(
        [*texts, *axes, *outcome, ("rank", pa.int64()), ("times_s", pa.list_(pa.float64()))]
    )


def _flat(row: Measurement) -> dict[str, Any]:
    case = row.case
    return {
        "kind": case.kind,
        "dtype": case.dtype,
        "direction": case.direction,
        **case.axes,
        "status": row.status.value,
        "error": row.error,
        "source": row.source.value,
        "rank": row.rank,
        "times_s": list(row.times_s),
    }


def _measurement(flat: dict[str, Any], *, operation: str) -> Measurement:
    case = {
        "operation": operation,
        "kind": flat["kind"],
        "dtype": flat["dtype"],
        "direction": flat["direction"],
        "axes": {axis: flat[axis] for axis in AXES[operation]},
    }
    return Measurement.model_validate(
        {
            "case": Case.model_validate(case),
            "status": flat["status"],
            "error": flat["error"],
            "source": flat["source"],
            "rank": flat["rank"],
            "times_s": flat["times_s"],
        }
    )


def _one_line(problem: object) -> str:
    text = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
    return " ".join(text.split())[:200]
