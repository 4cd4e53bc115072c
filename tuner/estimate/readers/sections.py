"""Typed access to a parsed TOML or JSON file: every value that is asked for counts as understood.

What nobody asked for is what the estimate ignores, and `left` lists it.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tuner.errors import SpecError
from tuner.spec.files import shown_value

LARGEST_NUMBER: Final = 2**31
SLIP_RATIO: Final = 0.92
"""Likeness of two names (difflib) from which on one is taken for a slip of the other."""
_DEEPEST: Final = 12


class Sections:
    """A nested mapping that remembers what was read of it; names are `section.key`."""

    def __init__(self, values: Mapping[str, Any], *, source: str) -> None:
        self.source = source
        self._values = values
        self._read: dict[str, str] = {}
        self._asked: set[str] = set()

    def value(self, name: str) -> Any:
        """Return what stands at a name; None where nothing does, or a section is missing."""
        self._asked.add(name)
        found: Any = self._values
        for key in name.split("."):
            if not isinstance(found, dict) or key not in found:
                return None
            found = found[key]
        if not (isinstance(found, dict) and found):
            self._read[name] = f"{name} = {shown_value(found)}"
        return found

    def number(self, name: str, *, default: int, least: int = 1) -> int:
        """Return a whole number.

        Raises:
            SpecError: something else stands there, or a number below `least`.
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
            SpecError: something else stands there.
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
            SpecError: something else stands there.
        """
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, str) or (choices and value not in choices):
            rule = f"none of {', '.join(choices)}" if choices else "not a text"
            raise SpecError(f"{self.source}: {name} {shown_value(value)} is {rule}")
        return value

    def check_spelling(self) -> None:
        """Refuse a key that is a slip in writing one that was asked for, once all were.

        Raises:
            SpecError: there is one; the message names the key that was likely meant.
        """
        for name, _ in _leaves(self._values, "", depth=0):
            section, _, key = name.rpartition(".")
            alike = {
                other.rpartition(".")[2]
                for other in self._asked
                if other.rpartition(".")[0] == section
            }
            near = difflib.get_close_matches(key, alike, n=1, cutoff=SLIP_RATIO)
            if near and name not in self._asked and not self._holds(section, near[0]):
                raise SpecError(
                    f"{self.source}: {name} is no setting; did you mean "
                    f"{f'{section}.' if section else ''}{near[0]}?"
                )

    def _holds(self, section: str, key: str) -> bool:
        return f"{section}.{key}".lstrip(".") in self._read

    @property
    def read(self) -> tuple[str, ...]:
        """Everything that was asked for and found."""
        return tuple(self._read.values())

    @property
    def left(self) -> tuple[str, ...]:
        """Everything that nobody asked for."""
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
