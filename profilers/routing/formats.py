"""The recordings that can be read, by the name that users type; and which of them a path holds.

The format of a path follows from its content: the first bytes of a file, the names in a folder.
Nothing is executed to find out, and nothing is executed to read it.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

from profilers.errors import RecordingUnreadableError, UnknownNameError
from profilers.files import open_regular
from profilers.routing.contents import NPY, TORCH, read_object, unreadable
from profilers.routing.recording import Recording, named

FORMATS: Final[Mapping[str, str]] = {
    "routing-json": "profilers.routing.plain_json:read",
    "sglang": "profilers.routing.sglang:read",
    "trtllm": "profilers.routing.trtllm:read",
    "megatron-trace": "profilers.routing.megatron_trace:read",
    "vllm-ascend": "profilers.routing.ascend:read",
    "eplb": "profilers.routing.sglang:read",
    "stored": "profilers.routing.store:read",
}
"""Readers `read(path) -> Recording`, which raise ValueError and OSError only."""

FORMER: Final = (
    "counts in CSV, as SGLang wrote them before 0.4.6.post5, are read no more: convert them to"
    " routing-json (layer_ids, num_logical_experts, logical_count [layers][experts])"
)
"""The way out for a format that earlier releases read."""

FOLDERS: Final = (
    ("stored", "recording.json"),
    ("trtllm", "meta_info.json"),
    ("megatron-trace", "router_trace_rank*.jsonl"),
    ("sglang", "expert_distribution_recorder_*.pt"),
    ("vllm-ascend", "*.npy"),
    ("vllm-ascend", "*.pt"),
)
"""Names by which a folder is recognised, in this order."""
WITHOUT_EXPERTS: Final = ("megatron-trace",)
"""Formats that list chosen experts and do not say how many there are."""
HEAD_BYTES: Final = 4096
"""Bytes of a file in which the first line of a trace identifies itself."""


def read_as(kind: str, path: Path, **stated: Any) -> Recording:
    """Read a recording of a named format; `stated` goes before what it says (`named`).

    Raises:
        UnknownNameError: there is no such format.
        RecordingUnreadableError: it is missing, damaged or not usable; one line says why.
    """
    if kind not in FORMATS:
        raise UnknownNameError(
            f"routing format {kind!r} is not one of {', '.join(FORMATS)}; {FORMER}"
        )
    module, _, attribute = FORMATS[kind].partition(":")
    reader = cast("Callable[[Path], Recording]", getattr(import_module(module), attribute))
    with unreadable(path):
        return named(reader(path), has_all_experts=kind not in WITHOUT_EXPERTS, **stated)


def recognised(path: Path) -> str:
    """Name the format of what lies there.

    Raises:
        RecordingUnreadableError: nothing lies there, or nothing that is known.
    """
    with unreadable(path):
        kind = _kind_of_folder(path) if path.is_dir() else _kind_of_file(path)
    inside = sorted(path.glob("routing/*/recording.json"))
    if inside and kind != "stored":
        raise RecordingUnreadableError(
            f"{path} is a profile and no recording; name one of those in it:"
            f" {', '.join(str(file.parent) for file in inside[:8])}"
        )
    if kind is None:
        raise RecordingUnreadableError(
            f"{path} is no recording of routing that is known; those are {', '.join(FORMATS)};"
            f" {FORMER}"
        )
    return kind


def _kind_of_folder(path: Path) -> str | None:
    kind = next((kind for kind, name in FOLDERS if next(path.glob(name), None)), None)
    if kind is None and any(b'"layer_list"' in _head(file) for file in path.glob("*.json")):
        return "vllm-ascend"
    return kind


def _kind_of_file(path: Path) -> str | None:
    head = _head(path)
    if b'"top_indices"' in head:
        return "megatron-trace"
    if head.startswith((NPY, *TORCH)):
        return "eplb" if head.startswith(NPY) else "sglang"
    if not head.lstrip().startswith(b"{"):
        return None
    values = read_object(path)
    if values.keys() & {"physical_to_logical_map", "layer_list"}:
        raise ValueError("is a placement, not a recording of loads; name the recording")
    if values.keys() & {"num_logical_experts", "layer_ids"}:
        return "routing-json"
    return "sglang" if "logical_count" in values else None


def _head(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read(HEAD_BYTES)
