"""Read aiconfigurator's measured tables of one system into a profile.

A systems folder holds `<system>.yaml` and, in the folder that its `data_dir` names or beside it,
tables in `<family>/<framework>/<version>/<table>.parquet`; older releases lack the family and write
comma-separated text. Without a path the folder of an installed `aiconfigurator-core` is read; the
package itself is never imported, so its engines are not loaded.

One profile is one machine with one software: the tables of one framework and NCCL's. Of several
versions the newest that measured a case counts, and every table's note says which versions and
kernels its rows come from. Rows that name another device than most are left out.

The tables of one framework are some 400,000 rows, which take a quarter of a minute to read back;
`operations` keeps only the named ones.

Not covered: kernels that our operations cannot hold (aiconfigurator_tables.py); they are named.
"""

import importlib.metadata
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml
from pydantic import ValidationError

from profilers.errors import (
    MissingLibraryError,
    ProfileUnreadableError,
    UnknownNameError,
    first_problem,
)
from profilers.files import TooLargeError, read_bounded
from profilers.imports.aiconfigurator_arrays import installed_systems
from profilers.imports.aiconfigurator_columns import (
    Columns,
    OddRowError,
    cells,
    read_columns,
    table_name,
)
from profilers.imports.aiconfigurator_tables import TABLES, TableRows
from profilers.imports.releases import release_order
from profilers.imports.result import Imported
from profilers.parquet import MAX_ROWS
from profilers.records import (
    AXES,
    Case,
    Machine,
    Measurement,
    Profile,
    ProfileHeader,
    Source,
    TableInfo,
)

COLLECTIVE_LIBRARY: Final = "nccl"
"""Framework of the collectives; they belong to every other framework's profile."""
MAX_SYSTEM_BYTES: Final = 2**20
MAX_FILES: Final = 10_000
WITHOUT_DIRECTION: Final = ("collective", "expert_all_to_all")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableFile:
    """One file."""

    name: str
    framework: str
    version: str
    path: Path


@dataclass(slots=True)
class _MeasuredRows:
    """Rows read so far; the first entry of a case stays."""

    operations: frozenset[str]
    """Operations to import."""
    measurement_of: dict[tuple[object, ...], Measurement] = field(default_factory=dict)
    origin: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of rows from each version and kernel, by operation."""


def read(path: Path | None, *, options: Mapping[str, str], created: str) -> Imported:
    """Read the tables of one system and framework.

    Raises:
        MissingLibraryError: no path is given and the package is not installed.
        UnknownNameError: the system or framework is not there, or none is named and there are
            several.
        ProfileUnreadableError: a file is missing or damaged, or nothing in it is of use.
    """
    root = path if path is not None else _installed()
    system, folder, described = _system(root, options.get("system"))
    tables = _tables(folder)
    framework = _chosen("framework", options.get("framework"), _frameworks(tables))
    wanted = [table for table in tables if table.framework in (framework, COLLECTIVE_LIBRARY)]
    operations = _operations(options.get("operations", ""))
    known = [
        table
        for table in wanted
        if table.name in TABLES and operations & TABLES[table.name].operations
    ]
    contents = {table.path: read_columns(table.path) for table in known}
    device = _device(contents.values())
    rows = _MeasuredRows(operations=operations)
    left_out = [f"{name}: no operation of a profile holds it" for name in _unknown(wanted)]
    for table in sorted(known, key=lambda table: release_order(table.version), reverse=True):
        strangers = _take(rows, table, contents.pop(table.path), device=device)
        if strangers:
            left_out.append(f"{table.path.name} {table.version}: {strangers} rows not of {device}")
    if not rows.measurement_of:
        raise ProfileUnreadableError(f"{folder}: no table of {framework} that a profile can hold")
    machine = _machine(described, system=system, device=device, tables=known)
    return Imported(profile=_profile(rows, machine, created), left_out=tuple(left_out))


def frameworks(path: Path | None, *, system: str | None) -> tuple[str, ...]:
    """Return the frameworks whose tables lie there, each a profile of its own.

    Raises:
        MissingLibraryError: no path is given and the package is not installed.
        UnknownNameError: the system is not there, or none is named and there are several.
        ProfileUnreadableError: a file is missing or damaged.
    """
    _, folder, _ = _system(path if path is not None else _installed(), system)
    return tuple(_frameworks(_tables(folder)))


def _frameworks(tables: Iterable[_TableFile]) -> list[str]:
    return sorted({table.framework for table in tables} - {COLLECTIVE_LIBRARY})


def _installed() -> Path:
    """The systems folder of the installed package, found without importing it."""
    folder = installed_systems()
    if folder is None:
        raise MissingLibraryError(
            "aiconfigurator-core is not installed: pip install 'moetune[nvidia]', or name the "
            "folder of its tables"
        )
    return folder


def _system(root: Path, name: str | None) -> tuple[str, Path, Mapping[str, Any]]:
    """The system's name, the folder of its tables and its description."""
    if not root.is_dir():
        raise ProfileUnreadableError(f"{root} is not a folder; name one with <system>.yaml files")
    files = {file.stem: file for file in sorted(root.glob("*.yaml"))}
    if not files:
        beside = [root.parent / f"{root.name}.yaml", root.parent.parent / f"{root.name}.yaml"]
        file = next((file for file in beside if file.is_file()), None)
        if file is None:
            raise ProfileUnreadableError(f"{root}: no <system>.yaml in it, nor one for it beside")
        return root.name, root, _described(file)
    folders = {}
    for system, file in files.items():
        # Other settings of the package lie beside the systems and are no business of ours.
        stated = _content(file)
        stated = stated.get("data_dir") if isinstance(stated, dict) else None
        places = [root / stated] if isinstance(stated, str) else []
        folder = next((place for place in (*places, root / system) if place.is_dir()), None)
        # A description may not lead out of the folder that the user named.
        if folder is not None and folder.resolve().is_relative_to(root.resolve()):
            folders[system] = folder
    chosen = _chosen("system", name, sorted(folders))
    return chosen, folders[chosen], _described(files[chosen])


def _described(file: Path) -> Mapping[str, Any]:
    content = _content(file)
    if not isinstance(content, dict):
        raise ProfileUnreadableError(f"{file}: is no mapping of a system's facts")
    return content


def _content(file: Path) -> Any:
    try:
        return yaml.safe_load(read_bounded(file, most_bytes=MAX_SYSTEM_BYTES).decode())
    except TooLargeError as error:
        raise ProfileUnreadableError(f"{file}: more than {MAX_SYSTEM_BYTES} bytes") from error
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ProfileUnreadableError(f"{file}: {reason}") from error


def _chosen(what: str, name: str | None, present: Sequence[str]) -> str:
    """The named one, or the only one."""
    if name in present:
        return str(name)
    listed = ", ".join(present) or "none"
    if name is not None:
        raise UnknownNameError(f"{what} {name!r} has no tables there; those with tables: {listed}")
    if len(present) != 1:
        together = (
            "" if what == "system" else "; a plan reads several profiles of a device together"
        )
        raise UnknownNameError(
            f"there are tables of several: say --{what} with one of {listed}{together}"
        )
    return present[0]


def _operations(written: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in written.split(",") if name.strip())
    if unknown := sorted(names - set(AXES)):
        raise UnknownNameError(f"operation {unknown[0]!r} is not one of {', '.join(AXES)}")
    return names or frozenset(AXES)


def _tables(folder: Path) -> list[_TableFile]:
    tables = []
    for file in itertools.islice(sorted(folder.rglob("*")), MAX_FILES):
        name, parts = table_name(file), file.relative_to(folder).parts
        if name is not None and len(parts) >= 3:
            *_, framework, version, _ = parts
            tables.append(_TableFile(name=name, framework=framework, version=version, path=file))
    return tables


def _unknown(tables: Sequence[_TableFile]) -> list[str]:
    return sorted({table.name for table in tables} - set(TABLES))


def _device(contents: Iterable[Columns]) -> str:
    """Return the device that most rows name."""
    named = Counter(name for columns in contents for name in cells(columns, "device") if name)
    return named.most_common(1)[0][0] if named else ""


def _take(rows: _MeasuredRows, table: _TableFile, columns: Columns, *, device: str) -> int:
    """Add the rows of one file; the number of those that were taken on another device."""
    named = cells(columns, "device")
    is_same = {name: _is_same_device(name, device) for name in set(named)}
    own_N = np.flatnonzero([is_same[name] for name in named])
    device_columns = {name: column[own_N] for name, column in columns.items()}
    kernels = [(name or table.name)[:80] for name in cells(device_columns, "kernel_source")]
    origins = [f"{table.framework} {table.version} {kernel}" for kernel in kernels]
    row = 0
    try:
        for read in TABLES[table.name].read(device_columns):
            for row in np.flatnonzero(read.keep_N).tolist():
                _add(rows, read, row, origin=origins[row])
    except KeyError as error:
        raise ProfileUnreadableError(f"{table.path}: column {error} is missing") from error
    except OddRowError as error:
        row = own_N[error.row] if own_N.size else 0
        raise ProfileUnreadableError(f"{table.path}: row {row}: {error}") from error
    except ValueError as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else error
        raise ProfileUnreadableError(f"{table.path}: row {own_N[row]}: {reason}") from error
    return len(named) - len(own_N)


def _is_same_device(named: str, device: str) -> bool:
    """Return whether a row is of this device; some name `NVIDIA H100` what others name in full."""
    shorter, longer = sorted((f"{named} ", f"{device} "), key=len)
    return not named or longer.startswith(shorter)


def _add(rows: _MeasuredRows, read: TableRows, row: int, *, origin: str) -> None:
    operation = read.operation
    axes = {axis: int(read.axes_N[axis][row]) for axis in AXES[operation]}
    kind, dtype = read.kind_N[row], read.dtype_N[row]
    key = (operation, kind, dtype, *axes.values())
    if operation not in rows.operations or key in rows.measurement_of:
        return
    if len(rows.measurement_of) >= MAX_ROWS:
        raise ValueError(f"more than {MAX_ROWS} rows in all")
    direction = "" if operation in WITHOUT_DIRECTION else "forward"
    case = Case(operation=operation, kind=kind, dtype=dtype, direction=direction, axes=axes)
    time_s = float(read.time_s_N[row])
    rows.measurement_of[key] = Measurement(case=case, source=Source.IMPORTED, times_s=(time_s,))
    rows.origin.setdefault(operation, Counter())[origin] += 1


def _machine(
    described: Mapping[str, Any], *, system: str, device: str, tables: Sequence[_TableFile]
) -> Machine:
    try:
        node, gpu = described["node"], described["gpu"]
        num_devices, memory_bytes = int(node["num_gpus_per_node"]), int(gpu["mem_capacity"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ProfileUnreadableError(
            f"{system}.yaml: node.num_gpus_per_node and gpu.mem_capacity must be numbers"
        ) from error
    newest: dict[str, str] = {}
    for table in sorted(tables, key=lambda table: release_order(table.version)):
        newest[table.framework] = table.version
    try:
        return Machine(
            hostname=f"aiconfigurator {system}",
            device=device or system,
            device_kind="cuda",
            num_devices=num_devices,
            memory_bytes_per_device=memory_bytes,
            cores=0,
            host_memory_bytes=0,
            world=num_devices,
            threads_per_rank=0,
            oversubscribed=False,
            libraries=newest,
        )
    except ValidationError as error:
        raise ProfileUnreadableError(f"{system}.yaml: {first_problem(error)}") from error


def _profile(rows: _MeasuredRows, machine: Machine, created: str) -> Profile:
    measurements = sorted(
        rows.measurement_of.values(), key=lambda row: list(AXES).index(row.case.operation)
    )
    count = Counter(row.case.operation for row in measurements)
    tables = {
        operation: TableInfo(
            rows=count[operation],
            complete=True,
            seconds=0.0,
            note="; ".join(
                f"{num} rows of {name}" for name, num in rows.origin[operation].most_common(12)
            ),
        )
        for operation in count
    }
    header = ProfileHeader(
        moetune_version=importlib.metadata.version("moetune"),
        created=created,
        machine=machine,
        tables=tables,
    )
    return Profile(header=header, measurements=tuple(measurements))
