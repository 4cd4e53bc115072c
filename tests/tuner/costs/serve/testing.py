"""Kernel tables of a system, from arrays in memory."""

from collections.abc import Sequence

from profilers.arrays import Arrays
from tuner.costs.serve.tables import KernelTables


def kernel_tables(system: str, arrays: Sequence[Arrays]) -> KernelTables:
    """Index tables of one system that are in memory already."""
    return KernelTables(
        system=system,
        read=lambda operation: [table for table in arrays if table.operation == operation],
    )
