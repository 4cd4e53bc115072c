"""aiconfigurator's tables of one system as arrays, for callers that need every framework at once.

A profile holds one machine with one software. A comparison of engines needs the tables of all of
them, more than a million rows, so that they are read column by column here and never become
records. A table that was imported and stored says what is said here.

Letters: N rows. Not covered: TensorRT-LLM's table of wide expert parallelism, the one of all-to-all
kernels beside DeepEP's, and attention with a window, which only the importer reads.
"""

import importlib.util
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from profilers.arrays import Arrays
from profilers.errors import ProfileUnreadableError
from profilers.imports.aiconfigurator_columns import OddRowError, read_columns, table_name
from profilers.imports.aiconfigurator_tables import TABLES, TableRows
from profilers.records import AXES, Source

PACKAGE: Final = "aiconfigurator_core"
LEFT_OUT: Final = frozenset({"wideep_moe_perf", "moe_a2a_perf", "windowed_attention"})
"""Tables, and an operation, that only the importer reads."""


def installed_systems() -> Path | None:
    """The folder of the installed package's tables, found without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) / "systems" if places else None


def holds_system(root: Path, *, system: str) -> bool:
    """Return whether a systems folder has a known table of a system."""
    return any(True for _ in _files(root, system))


def read_system(
    root: Path, *, system: str, operations: Collection[str] | None = None
) -> tuple[Arrays, ...]:
    """Read known tables of a system below a systems folder; empty where it has none.

    Args:
        root: the systems folder.
        system: name of the system.
        operations: those whose tables are read; None: every one.

    Raises:
        ProfileUnreadableError: a table is damaged, too large or lacks a column.
    """
    tables: list[Arrays] = []
    for file, name in _files(root, system):
        if operations is None or TABLES[name].operations & set(operations):
            *_, framework, version, _ = file.parts
            tables.extend(_arrays(file, name, framework=framework, version=version))
    return tuple(tables)


def _files(root: Path, system: str) -> Iterator[tuple[Path, str]]:
    """Every table that is known, with its name."""
    places = [root / "data" / system, root / system]
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        return
    for file in sorted(folder.rglob("*.parquet")):
        name = table_name(file)
        if name in TABLES.keys() - LEFT_OUT and len(file.relative_to(folder).parts) >= 3:
            yield file, name


def _arrays(file: Path, name: str, *, framework: str, version: str) -> Iterator[Arrays]:
    columns = read_columns(file)
    try:
        for rows in TABLES[name].read(columns):
            if rows.operation not in LEFT_OUT:
                yield from _kept(rows, framework=framework, version=version)
    except KeyError as error:
        raise ProfileUnreadableError(f"{file}: column {error} is missing") from error
    except OddRowError as error:
        raise ProfileUnreadableError(f"{file}: row {error.row}: {error}") from error


def _kept(rows: TableRows, *, framework: str, version: str) -> Iterator[Arrays]:
    """Rows of our operations with a time; nothing where there are none."""
    keep_N = rows.keep_N & (rows.time_s_N > 0.0)
    if not keep_N.any():
        return
    is_shared = rows.operation == "collective" and framework == "nccl"
    yield Arrays(
        operation=rows.operation,
        software="" if is_shared else framework.lower(),
        version=version,
        source=Source.IMPORTED,
        kind_N=rows.kind_N[keep_N],
        dtype_N=rows.dtype_N[keep_N],
        axes_N={axis: rows.axes_N[axis][keep_N] for axis in AXES[rows.operation]},
        time_s_N=rows.time_s_N[keep_N],
    )
