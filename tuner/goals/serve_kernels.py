"""Files that a pool's kernels are read from, and a hash of them, which makes two plans comparable.

The choice is that of tuner/backtest/serving/tables.py: profiles of the device that hold kernels,
else the first folder of tables with its system, else the datasheet, whose numbers are hashed in
place of a file's.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from profilers.files import open_regular
from profilers.imports.aiconfigurator_arrays import holds_system, installed_systems
from profilers.store import holds_profile, read_header
from tuner.backtest.serving.launches import SYSTEMS
from tuner.backtest.serving.tables import DATASHEET, PRODUCT
from tuner.devices.catalogue import device_of
from tuner.spec.cluster import Cluster, Pool

TABLE_ENDINGS: Final = (".parquet", ".yaml", ".json")
"""Endings of files that hold kernels or name their system."""


def kernel_hashes(cluster: Cluster, profiles: Sequence[Path]) -> dict[str, str]:
    """Return by pool the SHA-256 of the kernels that a plan of the cluster is priced on now.

    Raises:
        SpecError: a pool names no device.
        UnknownDeviceError: no description of a device.
        ProfileUnreadableError: a profile's header is damaged.
    """
    known: dict[tuple[str | None, Path | None], str] = {}
    hashes = {}
    for pool in cluster.pools:
        key = pool.device, pool.profile
        if key not in known:
            known[key] = _hash(pool, profiles)
        hashes[pool.name] = known[key]
    return hashes


def kernels_changed(
    planned: Mapping[str, str], cluster: Cluster, profiles: Sequence[Path]
) -> tuple[str, ...]:
    """Say of which pools other kernels are found now than a plan was priced on.

    Args:
        planned: hashes of the plan; empty of one that an older release made.
        cluster: of the plan.
        profiles: given now.
    """
    if not planned:
        return ()
    now = kernel_hashes(cluster, profiles)
    changed = [name for name, digest in planned.items() if now.get(name) != digest]
    if not changed:
        return ()
    return (
        f"other kernels are found now than the plan was priced on, for {', '.join(changed)}: give"
        " explain the --profile of the plan, or what is solved anew may differ for that alone",
    )


def installed_notes(sources: Mapping[str, str], cluster: Cluster) -> Iterator[str]:
    """Say which pools are priced from datasheets though measured kernels are installed.

    Args:
        sources: of kernels, by pool.
        cluster: of these pools.
    """
    folder = installed_systems()
    for pool in cluster.pools:
        system = _system(pool.sheet.name) if sources[pool.name] == DATASHEET else None
        if folder is not None and system is not None and holds_system(folder, system=system):
            yield (
                f"{pool.name}: the datasheet's kernels; aiconfigurator-core is installed and has"
                f" measured ones of {pool.sheet.name}, which --profile {folder} uses"
            )


def _system(device: str) -> str | None:
    """Return aiconfigurator's name of a device."""
    return next((system for system, name in SYSTEMS.items() if name == device), None)


def _hash(pool: Pool, profiles: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for name, sha256 in _parts(pool, profiles):
        digest.update(f"{name} {sha256}\n".encode())
    return digest.hexdigest()


def _parts(pool: Pool, profiles: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield the name and the hash of everything that prices a pool."""
    sheet = pool.sheet
    yield "datasheet", hashlib.sha256(repr(sheet).encode()).hexdigest()
    given = ((pool.profile,) if pool.profile is not None else ()) + tuple(profiles)
    stored = [path for path in given if holds_profile(path)]
    device_profiles = [path for path in stored if _speaks_for(path, device=sheet.name)]
    for path in device_profiles:
        yield from _files(path)
    if any(PRODUCT in read_header(path).tables for path in device_profiles):
        return
    system = _system(sheet.name)
    for folder in (path for path in given if path not in stored):
        if system is not None and holds_system(folder, system=system):
            places = (folder / "data" / system, folder / system)
            yield from _files(next(place for place in places if place.is_dir()))
            return


def _speaks_for(profile: Path, *, device: str) -> bool:
    return device_of(read_header(profile).machine).name == device


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix in TABLE_ENDINGS]
    for path in sorted(files):
        with open_regular(path) as stream:
            digest = hashlib.file_digest(stream, "sha256")
        yield path.relative_to(folder).as_posix(), digest.hexdigest()
