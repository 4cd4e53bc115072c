"""Source of each system's kernel times: profiles, a folder of tables, or the datasheet.

A profile covers its device; profiles of several engines on one device are read together. A folder
with `<system>.yaml` files is aiconfigurator's and is read directly. What neither covers comes from
the datasheet: tables that are merely installed change no answer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from profilers.arrays import Arrays, read_profile_arrays
from profilers.imports.aiconfigurator_arrays import holds_system, read_system
from profilers.store import holds_profile, read_header
from tuner.backtest.serving.launches import SYSTEMS
from tuner.devices.catalogue import find_device, profile_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.errors import SpecError
from tuner.prices.serve.machine import ServingMachine
from tuner.prices.serve.tables import KernelTables

DATASHEET = "datasheet"
PRODUCT = "gemm"
"""Table that every kernel profile has."""


def build_machines(
    systems: Sequence[str], profiles: Sequence[Path]
) -> tuple[dict[str, ServingMachine], dict[str, str]]:
    """Return a machine per system, and what its kernels were read from.

    Raises:
        SpecError: a folder is neither a profile nor one of tables.
        ProfileUnreadableError: a table is damaged.
    """
    stored = {path: profile_device(path) for path in profiles if holds_profile(path)}
    folders = [path for path in profiles if path not in stored]
    for folder in folders:
        if not any((folder / f"{system}.yaml").is_file() for system in SYSTEMS):
            raise SpecError(
                f"{str(folder)!r} is neither a stored profile nor a folder of tables with "
                "<system>.yaml files; 'moetune profile import aiconfigurator' writes the former"
            )
    machines, origins = {}, {}
    for system in systems:
        sheet = find_device(SYSTEMS[system])
        # A profile with only caches, links or storage is no source of kernels.
        device_profiles = [
            path
            for path, device in stored.items()
            if device == sheet.name and PRODUCT in read_header(path).tables
        ]
        read, origin = _reader(system, device_profiles, folders)
        tables = None if read is None else KernelTables(system=system, read=read)
        machines[system] = ServingMachine(sheet=sheet, tables=tables, engines=ENGINE_TRAITS)
        origins[system] = origin
    return machines, origins


def _reader(
    system: str, profiles: Sequence[Path], folders: Sequence[Path]
) -> tuple[Callable[[str], Sequence[Arrays]] | None, str]:
    """Return the reader of an operation's tables, and their origin."""
    if profiles:
        return partial(_stored, profiles), "profile"
    for folder in folders:
        if holds_system(folder, system=system):
            return partial(_published, folder, system), "tables"
    return None, DATASHEET


def _stored(profiles: Sequence[Path], operation: str) -> list[Arrays]:
    read = [read_profile_arrays(path, operations=(operation,)) for path in profiles]
    return [table for tables in read for table in tables]


def _published(folder: Path, system: str, operation: str) -> tuple[Arrays, ...]:
    return read_system(folder, system=system, operations=(operation,))
