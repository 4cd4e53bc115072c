"""Typed access to the fields of a config, each refusal naming file, field, value and rule."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tuner.errors import SpecError
from tuner.spec.files import shown_value
from tuner.spec.model import LARGEST_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFields:
    """The top level of one `config.json`."""

    values: Mapping[str, Any]
    source: str
    """Path of the file, for messages."""
    architecture: str = ""
    """Class of the model."""
    name: str = ""
    """Name of the model."""

    def refusal(self, name: str, rule: str) -> SpecError:
        """Build the error that says what is wrong with a field."""
        return SpecError(f"{self.source}: {name}: {rule}")

    def nested(self, name: str) -> "ConfigFields":
        """Return the fields of an object inside this one."""
        value = self._required(name)
        if not isinstance(value, dict):
            raise self.refusal(name, f"{shown_value(value)} is not an object")
        return replace(self, values=value, source=f"{self.source}: {name}")

    def text_config(self) -> "ConfigFields":
        """Return the language model's fields of a model that also reads images.

        Whether embedding and head are tied is stated outside.
        """
        text = self.nested("text_config")
        tied = {name: self.values[name] for name in ("tie_word_embeddings",) if self.has(name)}
        return replace(text, values={**tied, **text.values})

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self.values.get(name) is not None

    def size(
        self, name: str, *, default: int | None = None, least: int = 1, largest: int = LARGEST_SIZE
    ) -> int:
        """Read a whole number within bounds; `default` replaces an absent or null field."""
        if not self.has(name) and default is not None:
            return default
        value = self._required(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refusal(name, f"{shown_value(value)} is not a whole number")
        if not least <= value <= largest:
            raise self.refusal(name, f"{shown_value(value)} is not in {least}..{largest}")
        return value

    def optional_size(self, name: str, *, largest: int = LARGEST_SIZE) -> int | None:
        """Read a whole number of at least 1; None when the field is absent or null."""
        return self.size(name, largest=largest) if self.has(name) else None

    def number(self, name: str, *, below: float = math.inf, default: float | None = None) -> float:
        """Read a finite number above 0 and under `below`."""
        if not self.has(name) and default is not None:
            return default
        value = self._required(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refusal(name, f"{shown_value(value)} is not a number")
        if not 0 < value < below or value > 1e300:
            bound = "" if math.isinf(below) else f" and below {below:g}"
            raise self.refusal(name, f"{shown_value(value)} must be finite, above 0{bound}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Read true or false; `default` replaces an absent or null field."""
        if not self.has(name):
            return default
        value = self.values[name]
        if not isinstance(value, bool):
            raise self.refusal(name, f"{shown_value(value)} is neither true nor false")
        return value

    def text(self, name: str, *, default: str) -> str:
        """Read a text; `default` replaces an absent or null field."""
        if not self.has(name):
            return default
        value = self.values[name]
        if not isinstance(value, str):
            raise self.refusal(name, f"{shown_value(value)} is not a text")
        return value

    def typed_list(self, name: str, kind: type) -> list[Any] | None:
        """Read a list whose entries are all of one type; None when absent or null."""
        if not self.has(name):
            return None
        value = self.values[name]
        if not isinstance(value, list):
            raise self.refusal(name, f"{shown_value(value)} is not a list")
        for position, entry in enumerate(value):
            if not isinstance(entry, kind) or isinstance(entry, bool):
                raise self.refusal(
                    f"{name}[{position}]", f"{shown_value(entry)} is not of type {kind.__name__}"
                )
        return value

    def _required(self, name: str) -> Any:
        if not self.has(name):
            raise self.refusal(name, "missing, and the architecture needs it")
        return self.values[name]
