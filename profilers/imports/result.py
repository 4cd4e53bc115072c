"""The result of an importer: a profile, and the parts of the source that were left out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from profilers.records import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A profile made of others' measurements."""

    profile: Profile
    left_out: tuple[str, ...]
    """Tables or rows that no operation of ours can hold, one line each."""


class Importer(Protocol):
    """Interface of every entry of the registry."""

    def __call__(
        self, path: Path | None, *, options: Mapping[str, str], created: str
    ) -> Imported: ...
