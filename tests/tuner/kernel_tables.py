"""Kernel tables of a system, from arrays in memory."""

from collections.abc import Mapping, Sequence

import numpy as np

from profilers.arrays import Arrays
from profilers.records import AXES, Source
from tuner.prices.serve.tables import KernelTables


def kernel_tables(system: str, arrays: Sequence[Arrays]) -> KernelTables:
    """Index tables of one system that are in memory already."""
    return KernelTables(
        system=system,
        read=lambda operation: [table for table in arrays if table.operation == operation],
    )


def arrays_of(
    operation: str,
    rows: Sequence[tuple[Mapping[str, int], float]],
    *,
    software: str = "vllm",
    version: str = "1.0",
    kind: str = "",
    dtype: str = "bf16",
) -> Arrays:
    """Rows of one kind and dtype."""
    count = len(rows)
    return Arrays(
        operation=operation,
        software=software,
        version=version,
        source=Source.IMPORTED,
        kind_N=np.array([kind] * count, dtype=object),
        dtype_N=np.array([dtype] * count, dtype=object),
        axes_N={
            axis: np.array([axes[axis] for axes, _ in rows], dtype=np.int64)
            for axis in AXES[operation]
        },
        time_s_N=np.array([time_s for _, time_s in rows]),
    )
