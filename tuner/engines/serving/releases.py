"""Every described release of every serving engine, by the vendor of the devices."""

from collections.abc import Mapping
from typing import Final

from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.catalog.serve_rules.rules import LAUNCHERS
from tuner.catalog.serve_rules.traits import EngineTraits
from tuner.devices.datasheet import Vendor
from tuner.engines.registry import SERVE_ENGINES, engine_file
from tuner.errors import UnknownTargetError
from tuner.spec.cluster import Pool
from tuner.spec.serving.goal import Engine, Mode, ServeGoal

EVERY_RELEASE: Final[tuple[ServingCapabilities, ...]] = tuple(
    release for folder in SERVE_ENGINES for release in engine_file(folder, "capabilities").RELEASES
)
ENGINE_TRAITS: Final[Mapping[str, EngineTraits]] = {
    release.name: release.traits for release in EVERY_RELEASE
}
"""Every serving engine whatever its release, by the name users type."""

RELEASES: Final[Mapping[Vendor, Mapping[str, tuple[ServingCapabilities, ...]]]] = {
    vendor: {
        name: tuple(
            manifest
            for manifest in EVERY_RELEASE
            if (manifest.vendor, manifest.name) == (vendor, name)
        )
        for name in dict.fromkeys(
            manifest.name for manifest in EVERY_RELEASE if manifest.vendor is vendor
        )
    }
    for vendor in Vendor
}
"""Releases by vendor, then by the name users type, newest first; an absent engine does not run
there."""

ENGINES: Final = RELEASES[Vendor.NVIDIA]
"""Releases on NVIDIA devices by the name users type; `goal.engine.version` names one."""


def engine_manifest(engine: Engine, *, vendor: Vendor = Vendor.NVIDIA) -> ServingCapabilities:
    """Return the named release, or the newest.

    Raises:
        UnknownTargetError: the engine does not serve on such devices, or the release is not
            described.
    """
    on_vendor = RELEASES[vendor]
    if engine.name not in on_vendor:
        raise UnknownTargetError(
            f"goal.engine: {engine.name} does not serve on devices of {vendor}; those of {vendor}"
            f" are served by {' or '.join(sorted(on_vendor))}"
        )
    described = on_vendor[engine.name]
    if not engine.version:
        return described[0]
    for manifest in described:
        if manifest.release == engine.version:
            return manifest
    raise UnknownTargetError(
        f"goal.engine.version: no {engine.name} {engine.version!r} is described"
        f"{'' if vendor is Vendor.NVIDIA else f' for devices of {vendor}'}; there is"
        f" {', '.join(manifest.release for manifest in described)}"
    )


def pool_vendor(pool: Pool) -> Vendor:
    """Return the vendor of a pool's devices; NVIDIA if the pool names no device."""
    if pool.device is None:
        return Vendor.NVIDIA
    return pool.sheet.generation.vendor


def release_on(goal: ServeGoal, pool: Pool) -> ServingCapabilities:
    """Return the release that serves on a pool.

    With pools of several vendors, the version in `goal.engine` applies to NVIDIA devices, since
    plugins follow the engine's releases late; `goal.engines` names those of other pools.

    Raises:
        UnknownTargetError: the engine does not serve on the pool's devices, or its release is not
            described there.
    """
    vendor = pool_vendor(pool)
    pool_engine = goal.engines.get(pool.name)
    try:
        if pool_engine is not None:
            return engine_manifest(pool_engine, vendor=vendor)
        if vendor is Vendor.NVIDIA:
            return engine_manifest(goal.engine)
        return _on_other(goal.engine, vendor)
    except UnknownTargetError as error:
        raise UnknownTargetError(
            f"{error}; pool {pool.name!r} is of {vendor}: name another under goal.engines, or"
            " leave the pool out"
            if vendor is not Vendor.NVIDIA
            else str(error)
        ) from None


def releases_by_pool(goal: ServeGoal, pools: tuple[Pool, ...]) -> dict[str, ServingCapabilities]:
    """Return the release of each pool.

    Raises:
        UnknownTargetError: as `release_on`.
    """
    return {pool.name: release_on(goal, pool) for pool in pools}


def target_refusals(targets: tuple[str, ...], mode: Mode) -> tuple[str, ...]:
    """Return a line for every target that does not start a mode, for any release."""
    feature, launchers = LAUNCHERS.get(mode, ("", frozenset(targets)))
    able = launchers | {manifest.name for manifest in EVERY_RELEASE if mode in manifest.modes}
    return tuple(
        f"emit: {target} has no {feature}; emit {', '.join(sorted(able))}, or plan with other"
        " goal.modes"
        for target in dict.fromkeys(targets)
        if target not in able
    )


def _on_other(engine: Engine, vendor: Vendor) -> ServingCapabilities:
    described = RELEASES[vendor].get(engine.name, ())
    if engine.version in {manifest.release for manifest in described}:
        return engine_manifest(engine, vendor=vendor)
    if any(engine.version in ("", manifest.release) for manifest in ENGINES[engine.name]):
        return engine_manifest(engine.model_copy(update={"version": ""}), vendor=vendor)
    return engine_manifest(engine, vendor=vendor)
