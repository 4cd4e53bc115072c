"""Typed access to a parsed TOML or JSON file: every value that is read counts as understood.

Keys that are never read are ignored by the estimate, and `left` lists them.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from tuner.errors import SpecError
from tuner.spec.files import shown_value

LARGEST_NUMBER: Final = 2**31
SLIP_RATIO: Final = 0.92
"""Similarity (difflib) from which on one name counts as a misspelling of another."""
MOST_SEARCHED: Final = 200
"""Unknown names of one launch that are compared with the known ones, which takes milliseconds."""
_DEEPEST: Final = 12


class Sections:
    """A nested mapping that records which keys were read; names are `section.key`."""

    def __init__(
        self, values: Mapping[str, Any], *, source: str, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.source = source
        self._defaults = defaults or {}
        self._values = values
        self._read: dict[str, str] = {}
        self._requested: set[str] = set()

    def value(self, name: str) -> Any:
        """Return the value of a name; its default where the key or a section is missing."""
        self._requested.add(name)
        current: Any = self._values
        for key in name.split("."):
            if not isinstance(current, dict) or key not in current:
                return self._defaults.get(name)
            current = current[key]
        if not (isinstance(current, dict) and current):
            self._read[name] = f"{name} = {shown_value(current)}"
        return current

    def number(self, name: str, *, default: int, least: int = 1) -> int:
        """Return a whole number.

        Raises:
            SpecError: the value is of another type, or below `least`.
        """
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise SpecError(
                f"{self.source}: {name} {shown_value(value)} is not a whole number; write one, "
                f"e.g. {max(least, 1)}"
            )
        if not least <= value <= LARGEST_NUMBER:
            raise SpecError(
                f"{self.source}: {name} {shown_value(value)} is outside {least}..{LARGEST_NUMBER}; "
                f"the nearest is {min(max(value, least), LARGEST_NUMBER)}"
            )
        return value

    def is_on(self, name: str, *, default: bool = False) -> bool:
        """Return a yes or no.

        Raises:
            SpecError: the value is of another type.
        """
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SpecError(f"{self.source}: {name} {shown_value(value)} is neither true nor false")
        return value

    def word(self, name: str, *, default: str, choices: Sequence[str] = ()) -> str:
        """Return a text, one of `choices` where there are any.

        Raises:
            SpecError: the value is of another type.
        """
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, str) or (choices and value not in choices):
            rule = f"none of {', '.join(choices)}" if choices else "not a text"
            raise SpecError(f"{self.source}: {name} {shown_value(value)} is {rule}")
        return value

    def check_spelling(self) -> None:
        """Refuse a key that misspells one that was read; call it after all reads.

        Raises:
            SpecError: there is one; the message names the key that was likely meant.
        """
        unknown = (
            name for name, _ in _leaves(self._values, "", depth=0) if name not in self._requested
        )
        for name in islice(unknown, MOST_SEARCHED):
            section, _, key = name.rpartition(".")
            siblings = {
                requested.rpartition(".")[2]
                for requested in self._requested
                if requested.rpartition(".")[0] == section
            }
            near = difflib.get_close_matches(key, siblings, n=1, cutoff=SLIP_RATIO)
            if near and not self._holds(section, near[0]):
                raise SpecError(
                    f"{self.source}: {name} is no setting; did you mean "
                    f"{f'{section}.' if section else ''}{near[0]}?"
                )

    def _holds(self, section: str, key: str) -> bool:
        return f"{section}.{key}".lstrip(".") in self._read

    @property
    def read(self) -> tuple[str, ...]:
        """Every setting that was read and is present."""
        return tuple(self._read.values())

    @property
    def left(self) -> tuple[str, ...]:
        """Every setting that was never read."""
        return tuple(
            f"{name} = {shown_value(value)}"
            for name, value in _leaves(self._values, "", depth=0)
            if name not in self._read
        )


def _leaves(values: Mapping[str, Any], prefix: str, *, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        shown = key if key.isprintable() and len(key) <= 60 else shown_value(key)
        if isinstance(value, dict) and value and depth < _DEEPEST:
            yield from _leaves(value, f"{prefix}{shown}.", depth=depth + 1)
        else:
            yield f"{prefix}{shown}", value
