"""The dumps that can be read, by the name that users type; and which of them a path holds.

The format of a path follows from its content: the first bytes of a file, the names in a folder.
Nothing is executed to find out, and nothing is executed to read it.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol, cast

from pydantic import ValidationError

from profilers.errors import RecordingUnreadableError, UnknownNameError, first_problem
from profilers.files import open_regular
from profilers.routing.json_file import read_object
from profilers.routing.overrides import Naming
from profilers.routing.recording import Recording

FORMATS: Final[Mapping[str, str]] = {
    "routing-json": "profilers.routing.plain_json:read",
    "sglang": "profilers.routing.sglang:read",
    "trtllm": "profilers.routing.trtllm:read",
    "megatron-trace": "profilers.routing.megatron_trace:read",
    "vllm-ascend": "profilers.routing.ascend:read",
    "eplb": "profilers.routing.arrays:read",
}

FORMER: Final = (
    "counts in CSV, as SGLang wrote them before 0.4.6.post5, are read no more: convert them to"
    " routing-json (layer_ids, num_logical_experts, logical_count [layers][experts])"
)
"""The way out for a format that earlier releases read."""

HEAD_BYTES: Final = 4096
"""Bytes of a file that are read to detect its format; a trace's first line identifies it within
them."""


class Reader(Protocol):
    """Interface of every entry of the table; it raises ValueError and OSError only."""

    def __call__(self, path: Path, *, naming: Naming) -> Recording: ...


def read_as(kind: str, path: Path, *, naming: Naming) -> Recording:
    """Read a dump of a named format.

    Raises:
        UnknownNameError: there is no such format.
        RecordingUnreadableError: the dump is missing, damaged or not usable; one line says why.
    """
    if kind not in FORMATS:
        raise UnknownNameError(
            f"routing format {kind!r} is not one of {', '.join(FORMATS)}; {FORMER}"
        )
    module, _, attribute = FORMATS[kind].partition(":")
    reader = cast("Reader", getattr(import_module(module), attribute))
    try:
        return reader(path, naming=naming)
    except OSError as error:
        raise RecordingUnreadableError(f"{error.filename or path}: {error.strerror}") from error
    except ValidationError as error:
        raise RecordingUnreadableError(f"{path}: {first_problem(error)}") from error
    except ValueError as error:
        raise RecordingUnreadableError(f"{path}: {' '.join(str(error).split())[:300]}") from error


def recognised(path: Path) -> str:
    """Name the format of what lies there.

    Raises:
        RecordingUnreadableError: nothing lies there, or nothing that is known.
    """
    try:
        kind = _kind_of_folder(path) if path.is_dir() else _kind_of_file(path)
    except OSError as error:
        raise RecordingUnreadableError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise RecordingUnreadableError(f"{path}: {' '.join(str(error).split())[:300]}") from error
    if kind is None:
        raise RecordingUnreadableError(
            f"{path} is no recording of routing that is known; those are {', '.join(FORMATS)};"
            f" {FORMER}"
        )
    return kind


def _kind_of_folder(path: Path) -> str | None:
    from profilers.routing import ascend, megatron_trace, sglang, trtllm

    if (path / trtllm.META).exists():
        return "trtllm"
    for kind, pattern in (
        ("megatron-trace", megatron_trace.TRACES),
        ("sglang", sglang.DUMPS),
    ):
        if next(path.glob(pattern), None) is not None:
            return kind
    maps = [file for file in sorted(path.glob("*.json"))[:8] if ascend.is_map(read_object(file))]
    return "vllm-ascend" if maps else None


def _kind_of_file(path: Path) -> str | None:
    with open_regular(path) as file:
        head = file.read(HEAD_BYTES)
    if b'"top_indices"' in head:
        return "megatron-trace"
    if head.lstrip().startswith(b"{"):
        return _kind_of_object(read_object(path))
    if head.startswith(b"\x93NUMPY"):
        return "eplb"
    if head.startswith((b"PK", b"\x80")):
        from profilers.routing import arrays, sglang, tensors

        arrays.refuse_archive(path)
        return "sglang" if sglang.is_dump(tensors.load(path, mapped=True)) else "eplb"
    return None


def _kind_of_object(values: Mapping[str, Any]) -> str | None:
    if "num_logical_experts" in values or "layer_ids" in values:
        return "routing-json"
    if "logical_count" in values:
        return "sglang"
    if "physical_to_logical_map" in values or "layer_list" in values:
        raise ValueError("is a placement, not a recording of loads; name the recording")
    return None
