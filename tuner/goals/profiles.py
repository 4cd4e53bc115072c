"""Selects the stored profile of a pool of the spec, and the residual of earlier trials.

A plan's folder may be given as the profile that it was made from (`used/profile`); the residual of
its trials' engine, in its `verified.json`, is reused by later plans.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from profilers.records import ProfileHeader
from profilers.store import read_header
from tuner.costs.residuals import Residual
from tuner.devices.catalogue import find_device
from tuner.errors import SpecError, UnknownDeviceError
from tuner.goals.train_folder import read_verified
from tuner.plans.folder import PLAN_NAME
from tuner.spec.cluster import Pool

USED_PROFILE: Final = Path("used", "profile")
"""In the folder of a plan of one pool."""


def pool_profile(pool: Pool, profiles: Sequence[Path], *, is_only_pool: bool = True) -> Path | None:
    """Return the profile of a pool: of those given, or else the spec's.

    A single profile is used for a single pool, whatever it was measured on. Among several pools
    each takes the profile of its device; a pool without one is priced from its datasheet.

    Raises:
        ProfileUnreadableError: a profile is missing or damaged.
        SpecError: several were given and the pool names no device, or none is of its device.
    """
    own = None if pool.profile is None else stored_profile(pool.profile)
    if not profiles:
        return own
    headers = [(path, read_header(path)) for path in map(stored_profile, profiles)]
    if pool.device is None and len(headers) > 1:
        raise SpecError(
            f"cluster.pools: {pool.name!r} names no device to choose one of {len(headers)} "
            "profiles by; give one --profile, or the pool's 'device'"
        )
    if pool.device is None or (is_only_pool and len(headers) == 1):
        return headers[0][0]
    for path, header in headers:
        if is_of_device(header, pool.device):
            return path
    if not is_only_pool:
        return own
    devices = ", ".join(repr(header.machine.device) for _, header in headers)
    raise SpecError(
        f"cluster.pools: {pool.name!r} wants device {pool.device!r}; the profiles given are of "
        f"{devices}"
    )


def stored_profile(path: Path) -> Path:
    """Return the folder of a profile's tables: the folder itself, or `used/profile` of a plan."""
    used = path / USED_PROFILE
    return used if (path / PLAN_NAME).is_file() and used.is_dir() else path


def trial_residual(pool: Pool, profiles: Sequence[Path], engine: str) -> Residual | None:
    """Return the residual of an engine's trials, where a plan's folder is given as the profile.

    Raises:
        PlanUnreadableError: its `verified.json` is damaged.
    """
    for folder in profiles or filter(None, (pool.profile,)):
        verified = None if stored_profile(folder) == folder else read_verified(folder)
        residual = None if verified is None else verified.residual
        if residual is not None and residual.engine == engine:
            return residual
    return None


def is_of_device(header: ProfileHeader, device: str) -> bool:
    """Whether a profile was measured on a device of that name."""
    named = header.machine.device
    if device.casefold() in named.casefold():
        return True
    try:
        return find_device(device) is find_device(named)
    except UnknownDeviceError:
        return False
