"""Which stored profile speaks for a pool of the spec."""

from collections.abc import Sequence
from pathlib import Path

from profilers.records import ProfileHeader
from profilers.store import read_header
from tuner.devices.catalogue import find_device
from tuner.errors import SpecError, UnknownDeviceError
from tuner.spec.cluster import Pool


def profile_of(pool: Pool, profiles: Sequence[Path], *, is_alone: bool = True) -> Path | None:
    """Return the profile that speaks for a pool: of those given, or else the spec's.

    A single profile speaks for a pool that is alone, whatever it was measured on. Among several
    pools each takes the profile of its device, and one without any is left to its datasheet.

    Raises:
        ProfileUnreadableError: a profile is missing or damaged.
        SpecError: several were given and the pool names no device, or none is of its device.
    """
    if not profiles:
        return pool.profile
    headers = [(path, read_header(path)) for path in profiles]
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
        return pool.profile
    found = ", ".join(repr(header.machine.device) for _, header in headers)
    raise SpecError(
        f"cluster.pools: {pool.name!r} wants device {pool.device!r}; the profiles given are of "
        f"{found}"
    )


def is_of_device(header: ProfileHeader, device: str) -> bool:
    """Whether a profile was measured on a device of that name."""
    named = header.machine.device
    if device.casefold() in named.casefold():
        return True
    try:
        return find_device(device) is find_device(named)
    except UnknownDeviceError:
        return False
