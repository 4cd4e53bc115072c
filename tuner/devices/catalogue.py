"""All device descriptions, and their lookup by name or alias."""

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from profilers.records import Machine
from tuner.devices import ampere, blackwell, hopper, others
from tuner.devices.datasheet import Datasheet
from tuner.errors import UnknownDeviceError

DEVICES: Final[Mapping[str, Datasheet]] = MappingProxyType(
    {
        sheet.name: sheet
        for module in (ampere, hopper, blackwell, others)
        for name, sheet in vars(module).items()
        if isinstance(sheet, Datasheet) and not name.startswith("_")
    }
)
"""By name, as a spec writes it."""


def spelling(name: str) -> str:
    """Normalise a name to lower-case letters and digits."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_SPELLING: Final[Mapping[str, Datasheet]] = MappingProxyType(
    {spelling(name): sheet for sheet in DEVICES.values() for name in (sheet.name, *sheet.aliases)}
)
_LONGEST_NAME: Final = 80
"""Most characters of an unknown name in a message."""


def find_device(name: str) -> Datasheet:
    """Return the device that `name` means; case, spaces and punctuation do not matter.

    Raises:
        UnknownDeviceError: no device has this name or alias.
    """
    sheet = _BY_SPELLING.get(spelling(name))
    if sheet is None:
        raise UnknownDeviceError(_unknown(name[:_LONGEST_NAME]))
    return sheet


def device_of(machine: Machine) -> Datasheet:
    """Return the device that a profile was measured on; processors without a datasheet are one.

    Raises:
        UnknownDeviceError: no description of an accelerator.
    """
    if machine.device_kind == "cpu" and spelling(machine.device) not in _BY_SPELLING:
        return others.CPU
    return find_device(machine.device)


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(spelling(name), sorted(_BY_SPELLING), n=1, cutoff=0.6)
    meant = f"did you mean {_BY_SPELLING[near[0]].name!r}? " if near else ""
    return f"no device description is named {name!r}; {meant}known: {', '.join(DEVICES)}"
