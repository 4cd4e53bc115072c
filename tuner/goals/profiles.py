"""Selects the stored profile of a pool of the spec, and what a plan may use of the pool by it.

A plan's folder may be given as the profile that it was made from (`used/profile`); the residual of
its trials' engine, in its `verified.json`, is reused by later plans.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from profilers.records import Machine, Profile, ProfileHeader
from profilers.store import read_header
from tuner.costs.residuals import Residual, residual_for
from tuner.devices.catalogue import find_device
from tuner.errors import SpecError, UnknownDeviceError
from tuner.plans.folder import PLAN_NAME, plan_kind, read_verified_as
from tuner.prices.profile import ProfilePrices
from tuner.search.reference.layer_costs import PricedMachine
from tuner.spec.cluster import Pool
from tuner.verify.launches import REFERENCE
from tuner.verify.records import Verified

USED_PROFILE: Final = Path("used", "profile")
"""Profile in the folder of a plan of one pool."""


def pool_profile(pool: Pool, profiles: Sequence[Path], *, is_only_pool: bool = True) -> Path | None:
    """Return the profile of a pool: of those given, or else the spec's.

    A single profile is used for a single pool, whatever it was measured on. Among several pools
    each takes the profile of its device; a pool without one is priced from its datasheet.

    Raises:
        ProfileUnreadableError: a profile is missing or damaged.
        SpecError: several were given and the pool names no device, or none is of its device.
    """
    spec_profile = None if pool.profile is None else stored_profile(pool.profile)
    if not profiles:
        return spec_profile
    headers = [(path, read_header(path)) for path in map(stored_profile, profiles)]
    if pool.device is None and len(headers) > 1:
        raise SpecError(
            f"cluster.pools: {pool.name!r} names no device to choose one of {len(headers)} "
            "profiles by; give one --profile, or the pool's 'device'"
        )
    if pool.device is None or (is_only_pool and len(headers) == 1):
        return headers[0][0]
    for path, header in headers:
        if is_of_device(header, pool):
            return path
    if not is_only_pool:
        return spec_profile
    devices = ", ".join(repr(header.machine.device) for _, header in headers)
    raise SpecError(
        f"cluster.pools: {pool.name!r} wants device {pool.device!r}; the profiles given are of "
        f"{devices}"
    )


def stored_profile(path: Path) -> Path:
    """Return the folder of a profile's tables: the folder itself, or `used/profile` of a plan."""
    used = path / USED_PROFILE
    return used if (path / PLAN_NAME).is_file() and used.is_dir() else path


def is_plan_of(folder: Path, kind: str) -> bool:
    """Return whether a folder that stands for a profile is a plan of that goal.

    Raises:
        PlanUnreadableError: its `plan.json` is damaged.
    """
    return stored_profile(folder) != folder and plan_kind(folder) in (kind, None)


def trial_residual(pool: Pool, profiles: Sequence[Path], engine: str) -> Residual | None:
    """Return the residual of an engine's trials, where a plan's folder is given as the profile.

    Raises:
        PlanUnreadableError: its `verified.json` is damaged.
    """
    for folder in profiles or filter(None, (pool.profile,)):
        verified = read_verified_as(Verified, folder) if is_plan_of(folder, "train") else None
        residual = None if verified is None else verified.residual
        if residual is not None and residual.engine == engine:
            return residual
    return None


def is_of_device(header: ProfileHeader, pool: Pool) -> bool:
    """Return whether a profile was measured on a pool's device; the spec's own goes by its name.

    Raises:
        SpecError: the pool names no device.
    """
    named = header.machine.device
    if pool.device is not None and pool.device.casefold() in named.casefold():
        return True
    try:
        return pool.sheet is find_device(named)
    except UnknownDeviceError:
        return False


def shipped_residual(engine: str, measured: Machine) -> Residual:
    """Return the shipped residual of an engine on a machine; for others, 1 with a wide band."""
    return residual_for(
        engine,
        device=measured.device,
        device_kind=measured.device_kind,
        nodes=measured.nodes,
    )


def _cores_per_rank(measured: Machine) -> float:
    """Cores per rank of an oversubscribed host, otherwise 1."""
    if measured.device_kind != "cpu" or not measured.oversubscribed:
        return 1.0
    ranks = max(Counter(measured.hosts).values(), default=measured.world)
    return min(1.0, measured.cores / ranks)


def machine_of(pool: Pool, profile: Profile, *, residual: Residual | None = None) -> PricedMachine:
    """Return the resources that a plan may use of a profiled pool.

    Args:
        pool: of the spec.
        profile: of the reference step's operations.
        residual: of the launched engine; None: the shipped one of the reference step.
    """
    measured = profile.header.machine
    memory_bytes = pool.memory_per_device or measured.memory_bytes_per_device
    return PricedMachine(
        num_devices=pool.num_devices,
        memory_limit_bytes=int(memory_bytes * pool.usable_memory_ratio),
        prices=ProfilePrices.from_profile(profile),
        residual=residual or shipped_residual(REFERENCE, measured),
        ranks_per_node=pool.devices_per_node,
        cores_per_rank=_cores_per_rank(measured),
        measured_ranks=measured.world,
        measured_nodes=measured.nodes,
    )
