"""What a device must have in total where more memory is offered: one wording for all planners."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from tuner.units import format_bytes


class MemoryOffer(NamedTuple):
    """Total memory of the devices of a pool, whatever share a plan may use."""

    needed_bytes: float
    has_bytes: float
    pool: str = ""
    """Empty where there is but one."""


def memory_words(offers: Iterable[MemoryOffer]) -> str:
    """Say what a device must have in total, rounded up, so that the printed size suffices."""
    return "; ".join(
        f"{format_bytes(printed_bytes(one.needed_bytes))} per device"
        f"{f' of pool {one.pool!r}' if one.pool else ''} instead of "
        f"{format_bytes(int(one.has_bytes))}"
        for one in offers
    )


def printed_bytes(needed_bytes: float) -> int:
    """Return the least size of three digits in its unit that is not below a number of bytes."""
    unit = 1
    while needed_bytes >= 1024 * unit:
        unit *= 1024
    step = 10.0 ** (math.floor(math.log10(max(1.0, needed_bytes / unit))) - 2)
    return math.ceil(math.ceil(needed_bytes / unit / step - 1e-9) * step * unit)
