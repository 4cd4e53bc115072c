"""A simple spec: its fields, each with flag, default and check, and its text.

The key of a field is its flag (`--sequence-length`). A value is text, as typed; a check reads it
with the values of the fields before it and refuses it in one line. A default of None makes the
field mandatory, an empty one leaves it out. The drafts are in train.py, serve.py and place.py; what
they share is here.

Not covered: what a spec can say beyond the simple case (several pools, profiles, recorded routing,
failures, length distributions); add it to the written file.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tuner.devices.catalogue import find_device
from tuner.errors import SpecError
from tuner.spec.files import home_expanded, shown_value
from tuner.spec.huggingface.read import read_model
from tuner.units import parse_whole

FieldValues = Mapping[str, str]
LARGEST: Final = 2**31
"""Largest count, as in a spec."""
HEAD: Final = "# `moetune plan` reads this file; `moetune schema {schema}` lists all of its fields."


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecField:
    """One field of a simple spec."""

    key: str
    """The flag without its dashes."""
    default: str | None
    check: Callable[[str, FieldValues], None]
    """Raises SpecError for an unacceptable value."""
    unless: str = ""
    """Key of another field: one of the two has to be set."""
    derived: Callable[[FieldValues], str] | None = None
    """Derives the default from known values, other flags included; empty: `default` is used."""

    def default_value(self, known: FieldValues) -> str | None:
        """Return the default, given the known values.

        Raises:
            SpecError: nothing can be derived from what is known.
        """
        derived = "" if self.derived is None else self.derived(known)
        return derived or self.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The simple spec of a goal."""

    kind: str
    fields: tuple[SpecField, ...]
    """Fields, each after those that its default or check needs."""
    lines: Callable[[FieldValues, Path | None], Iterator[str]]
    """Function that yields the lines of a spec, from the checked values and the folder that paths
    are made relative to."""
    check: Callable[[Path], object]
    """Reads a written spec. Raises SpecError where `moetune plan` would."""

    def text(self, values: FieldValues, *, folder: Path | None) -> str:
        """Return the text of a spec.

        Args:
            values: of every field, checked.
            folder: that the file will lie in, which its paths are made relative to; None: absolute.
        """
        return "\n".join(self.lines(values, folder)) + "\n"


def split_into_nodes(values: FieldValues) -> tuple[int, int]:
    """Return nodes and devices per node for a number of devices in standard servers.

    Raises:
        SpecError: they fill no whole number of servers.
    """
    sheet, devices = find_device(values["device"]), int(values["devices"])
    per_node = min(devices, sheet.devices_per_node)
    if devices % per_node:
        below = devices // per_node * per_node
        raise SpecError(
            f"--devices: {devices} fill no whole servers of {per_node} {sheet.name};"
            f" the nearest that do: {below} and {below + per_node}"
        )
    return devices // per_node, per_node


def _check_model(text: str, _values: FieldValues) -> None:
    read_model(home_expanded(text))


def _check_device(text: str, _values: FieldValues) -> None:
    find_device(text)


def _check_devices(text: str, values: FieldValues) -> None:
    check_whole("devices")(text, values)
    split_into_nodes({**values, "devices": text})


def check_whole(
    key: str, *, least: int = 1, largest: int = LARGEST
) -> Callable[[str, FieldValues], None]:
    """Return the check of a whole number."""

    def check(text: str, _values: FieldValues) -> None:
        number = parse_whole(text)
        if number is None or not least <= number <= largest:
            raise SpecError(
                f"--{key}: {shown_value(text)} is not a whole number in {least}..{largest}"
            )

    return check


def check_one_of(key: str, names: tuple[str, ...]) -> Callable[[str, FieldValues], None]:
    """Return the check of a name among some."""

    def check(text: str, _values: FieldValues) -> None:
        if text not in names:
            raise SpecError(f"--{key}: {shown_value(text)} is not one of {', '.join(names)}")

    return check


def check_quantity(key: str, parse: Callable[[str], float]) -> Callable[[str, FieldValues], None]:
    """Return the check of a positive quantity with its unit."""

    def check(text: str, _values: FieldValues) -> None:
        try:
            value = parse(text)
        except ValueError as error:
            raise SpecError(f"--{key}: {error}") from error
        if value <= 0.0:
            raise SpecError(f"--{key}: {text!r} must be more than nothing")

    return check


def parse_targets(text: str) -> tuple[str, ...]:
    """Read comma-separated names; none for `none`."""
    names = tuple(filter(None, (piece.strip() for piece in text.split(","))))
    return () if names == ("none",) else names


MODEL: Final = SpecField(key="model", default=None, check=_check_model)
MACHINES: Final = (
    SpecField(key="device", default=None, check=_check_device),
    SpecField(key="devices", default=None, check=_check_devices),
)


def cluster_lines(values: FieldValues) -> Iterator[str]:
    """Yield the lines of a cluster of one pool."""
    sheet = find_device(values["device"])
    nodes, per_node = split_into_nodes(values)
    yield "cluster:"
    yield "  pools:"
    yield f"    - name: {quoted(sheet.name)}"
    yield f"      device: {quoted(sheet.name)}           # its datasheet; or  profile: DIR"
    yield f"      nodes: {nodes}"
    yield f"      devices_per_node: {per_node}"
    yield "      # nic: 400Gbit/s              # of one network card; absent: the datasheet's"
    yield "      # price_per_device_hour: 3.5"
    yield "      # host: {memory: 2TB, reserve: 64GB}  # of one machine; bounds offloading"
    yield "  # currency: USD                  # of the prices"


def path_text(text: str, folder: Path | None) -> str:
    """Return a path as YAML, relative to a folder where one is named."""
    path = home_expanded(text).absolute()
    if folder is None:
        return quoted(str(path))
    return quoted(Path(os.path.relpath(path, folder.absolute())).as_posix())


def list_text(text: str) -> str:
    """Return comma-separated names as a YAML list."""
    return f"[{', '.join(quoted(name) for name in parse_targets(text))}]"


def quoted(text: str) -> str:
    """Write text as YAML that reads back the same; plain where that is safe."""
    is_plain = text.replace("-", "").replace("_", "").isalnum() and text[:1].isalpha()
    is_plain &= text.isascii() and text.lower() not in _WORDS
    return text if is_plain else json.dumps(text, ensure_ascii=False)


_WORDS: Final = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
"""Words that YAML reads as something else than text."""
