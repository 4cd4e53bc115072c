"""Which stored profile speaks for a pool of the spec, and what launches said about it.

The folder of a plan stands for the profile that it was made from (`used/profile`); what its trials
said of the engine that they ran, the residual in its `verified.json`, is kept for later plans.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from profilers.records import ProfileHeader
from profilers.store import read_header
from tuner.costs.residuals import Residual
from tuner.devices.catalogue import find_device
from tuner.errors import SpecError, UnknownDeviceError
from tuner.plan_folder import PLAN_NAME, read_verified
from tuner.spec.cluster import Pool

USED_PROFILE: Final = Path("used", "profile")
"""In the folder of a plan of one pool."""


def profile_of(pool: Pool, profiles: Sequence[Path], *, is_alone: bool = True) -> Path | None:
    """Return the profile that speaks for a pool: of those given, or else the spec's.

    A single profile speaks for a pool that is alone, whatever it was measured on. Among several
    pools each takes the profile of its device, and one without any is left to its datasheet.

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
    if pool.device is None or (is_alone and len(headers) == 1):
        return headers[0][0]
    for path, header in headers:
        if is_of_device(header, pool.device):
            return path
    if not is_alone:
        return own
    found = ", ".join(repr(header.machine.device) for _, header in headers)
    raise SpecError(
        f"cluster.pools: {pool.name!r} wants device {pool.device!r}; the profiles given are of "
        f"{found}"
    )


def stored_profile(path: Path) -> Path:
    """Return where the tables of a profile lie: in the folder itself, or in that of a plan."""
    used = path / USED_PROFILE
    return used if (path / PLAN_NAME).is_file() and used.is_dir() else path


def kept_residual(pool: Pool, profiles: Sequence[Path], engine: str) -> Residual | None:
    """Return what trials said of an engine, where the folder of their plan stands for a profile.

    Raises:
        PlanUnreadableError: its `verified.json` is damaged.
    """
    for folder in profiles or filter(None, (pool.profile,)):
        verified = None if stored_profile(folder) == folder else read_verified(folder)
        found = None if verified is None else verified.residual
        if found is not None and found.engine == engine:
            return found
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
