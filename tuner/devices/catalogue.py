"""All device descriptions, and their lookup by name or alias."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from profilers.records import Machine
from profilers.store import read_header
from tuner.devices.datasheet import Datasheet
from tuner.errors import SpecError, UnknownDeviceError

DEVICES: Final[Mapping[str, Datasheet]] = MappingProxyType(
    {
        path.stem: Datasheet.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        for path in sorted(Path(__file__).with_name("sheets").glob("*.toml"))
    }
)
"""Devices by name, as a spec writes it; one file of `sheets/` each."""
CPU: Final = DEVICES["cpu"]
"""A placeholder: one core, until a profile says more (measured.py)."""


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
        return CPU
    return find_device(machine.device)


def profile_device(profile: Path) -> str:
    """Return the datasheet name of a stored profile's device.

    Raises:
        SpecError: its device has none.
    """
    name = read_header(profile).machine.device
    try:
        return find_device(name).name
    except UnknownDeviceError as error:
        raise SpecError(f"{str(profile)!r}: {error}") from error


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(spelling(name), sorted(_BY_SPELLING), n=1, cutoff=0.6)
    meant = f"did you mean {_BY_SPELLING[near[0]].name!r}? " if near else ""
    return (
        f"no device description is named {name!r}; {meant}known: {', '.join(DEVICES)}. A device"
        " can also be described in the spec (device: {name: ..., generation: ..., ...}) or"
        " measured (profile: FOLDER)"
    )
