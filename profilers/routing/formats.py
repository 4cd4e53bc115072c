"""The dumps that can be read, by the name that users type; and which of them a path holds.

What a path holds is told by its content: the first bytes of a file, the names in a folder. Nothing
is executed to find out, and nothing is executed to read it.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol, cast

from profilers.errors import RecordingUnreadableError, UnknownNameError
from profilers.routing.json_file import read_object
from profilers.routing.naming import Naming
from profilers.routing.recording import Recording

FORMATS: Final[Mapping[str, str]] = {
    "routing-json": "profilers.routing.plain_json:read",
}

HEAD_BYTES: Final = 4096
"""Of a file that are looked at; a trace's first line says what it is well within them."""


class Reader(Protocol):
    """What every entry of the table is; it raises ValueError and OSError only."""

    def __call__(self, path: Path, *, naming: Naming) -> Recording: ...


def read_as(kind: str, path: Path, *, naming: Naming) -> Recording:
    """Read a dump of a named format.

    Raises:
        UnknownNameError: there is no such format.
        RecordingUnreadableError: the dump is missing, damaged or not usable; one line says why.
    """
    if kind not in FORMATS:
        raise UnknownNameError(f"routing format {kind!r} is not one of {', '.join(FORMATS)}")
    module, _, attribute = FORMATS[kind].partition(":")
    reader = cast("Reader", getattr(import_module(module), attribute))
    try:
        return reader(path, naming=naming)
    except OSError as error:
        raise RecordingUnreadableError(f"{error.filename or path}: {error.strerror}") from error
    except ValueError as error:
        raise RecordingUnreadableError(f"{path}: {' '.join(str(error).split())[:300]}") from error


def recognised(path: Path) -> str:
    """Name the format of what lies there.

    Raises:
        RecordingUnreadableError: nothing lies there, or nothing that is known.
    """
    try:
        kind = _kind_of_file(path)
    except OSError as error:
        raise RecordingUnreadableError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise RecordingUnreadableError(f"{path}: {' '.join(str(error).split())[:300]}") from error
    if kind is None:
        raise RecordingUnreadableError(
            f"{path} is no recording of routing that is known; those are {', '.join(FORMATS)}"
        )
    return kind


def _kind_of_file(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.lstrip().startswith(b"{"):
        return _kind_of_object(read_object(path))
    return None


def _kind_of_object(values: Mapping[str, Any]) -> str | None:
    if "num_logical_experts" in values or "layer_ids" in values:
        return "routing-json"
    return None
