"""Tables of a profile as arrays, one per operation: for readers of many thousand rows.

`read_profile` validates every row as a record, which takes seconds per table. Here a table stays
in columns: labels as short texts, axes as whole numbers, the median of the repeats as seconds. The
same limits hold as for records, and nothing but numbers and texts is taken.

Letters: N rows. Not covered: single repeats, ranks, rows that failed (they are left out).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from profilers.errors import ProfileUnreadableError
from profilers.records import AXES, Source
from profilers.store import read_header

Texts = npt.NDArray[np.object_]
Counts = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrays:
    """Rows of one operation that one software was measured with."""

    operation: str
    """A key of `AXES`."""
    software: str
    """Name of the framework, lower-case; empty where the rows belong to none."""
    version: str
    source: Source
    kind_N: Texts
    dtype_N: Texts
    axes_N: Mapping[str, Counts]
    time_s_N: Seconds

    def __post_init__(self) -> None:
        num = len(self.time_s_N)
        if tuple(self.axes_N) != AXES[self.operation]:
            raise ValueError(f"{self.operation} needs the axes {AXES[self.operation]}")
        columns = (self.kind_N, self.dtype_N, *self.axes_N.values())
        if any(len(column) != num for column in columns):
            raise ValueError(f"{self.operation}: columns of unlike lengths")
        if not (np.isfinite(self.time_s_N).all() and (self.time_s_N > 0.0).all()):
            raise ValueError(f"{self.operation}: a time is not above 0")


def read_profile_arrays(path: Path, *, operations: Collection[str]) -> tuple[Arrays, ...]:
    """Read tables of a stored profile, as far as it holds them.

    Raises:
        ProfileUnreadableError: the profile is missing, damaged or not one.
    """
    from profilers.tables import read_columns

    header = read_header(path)
    libraries = header.machine.libraries
    known = [name for name in ("vllm", "sglang", "trtllm") if name in libraries]
    software = known[0] if len(known) == 1 else ""
    tables = []
    for operation in operations:
        if operation not in header.tables:
            continue
        columns = read_columns(
            path / f"{operation}.parquet",
            operation=operation,
            expected_rows=header.tables[operation].rows,
        )
        is_own = operation != "collective"
        try:
            tables.append(
                Arrays(
                    operation=operation,
                    software=software if is_own else "",
                    version=libraries.get(software, ""),
                    source=columns.source,
                    kind_N=columns.kind_N,
                    dtype_N=columns.dtype_N,
                    axes_N=columns.axes_N,
                    time_s_N=columns.time_s_N,
                )
            )
        except ValueError as error:
            raise ProfileUnreadableError(f"{path}: {error}; measure it again") from error
    return tuple(tables)
