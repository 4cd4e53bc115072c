"""Measured conversions of KV caches from the stored profiles of a device.

Only their table is read, since a profile may hold a million other rows. Profiles of other devices
are skipped.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from profilers.store import holds_profile, read_header, read_profile
from tuner.devices.catalogue import device_of
from tuner.prices.profile import ProfilePrices

OPERATION: Final = "kv_conversion"


def conversion_prices(profiles: Iterable[Path], *, device: str) -> ProfilePrices | None:
    """Return those of the first profile of the device that has them; None where there is none.

    Args:
        profiles: stored profiles; folders of other kinds are passed over.
        device: the name of its description.

    Raises:
        UnknownDeviceError: a profile is of a device that nothing describes.
        ProfileUnreadableError: a table is damaged.
    """
    for path in profiles:
        if not holds_profile(path):
            continue
        header = read_header(path)
        is_measured = OPERATION in header.tables and header.tables[OPERATION].rows > 0
        if is_measured and device_of(header.machine).name == device:
            return ProfilePrices.from_profile(read_profile(path, operations=(OPERATION,)))
    return None
