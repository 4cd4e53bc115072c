"""A recording on disk: a folder of `recording.json` and a Parquet table for each array.

    counts.parquet         pass, layer: token copies of every expert
    transitions.parquet    layer, expert: copies that used every expert of the next recorded layer
    tokens.parquet         layer, token: chosen experts of sampled tokens

Only counts are always there. A layer in a table is its position among the recorded layers; their
absolute numbers are in `recording.json`, and so are the sizes that every table must have.

The folder is written under another name and renamed, so a reader finds the old recording or the new
one, never half of one.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from pydantic import Field, ValidationError

from profilers.errors import ProfileUnwritableError, first_problem
from profilers.files import read_bounded
from profilers.records import Record
from profilers.routing.contents import unreadable
from profilers.routing.recording import Recording, numbers, require_room
from profilers.schema_version import moetune_version

SCHEMA_VERSION: Final = 1
# 1: first release.

HEADER_NAME: Final = "recording.json"
MAX_HEADER_BYTES: Final = 2**20
FORMER: Final = ("coactivation.parquet", "sources.parquet")
"""Tables of former releases."""

Size = Annotated[int, Field(ge=1)]


class _StoredArray(NamedTuple):
    """File of an array of the recording, and the names of its axes but the last."""

    file: str
    axes: tuple[str, ...]
    dtype: type[np.generic]


TABLES: Final[Mapping[str, _StoredArray]] = {
    "count_PLE": _StoredArray("counts.parquet", ("pass", "layer"), np.int64),
    "transition_MEE": _StoredArray("transitions.parquet", ("layer", "expert"), np.float64),
    "token_LTK": _StoredArray("tokens.parquet", ("layer", "token"), np.int32),
}
"""Stored arrays by field of `Recording`."""


class RecordingHeader(Record):
    """`recording.json`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    moetune_version: str
    created: str
    """ISO 8601, UTC; empty where nobody said."""
    origin: str
    """Source of the recording, in a few words."""
    model: str
    workload: str
    layer_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    decoder_layers: Size | None = None
    """Decoder layers of the model, dense ones included; absent where the source does not say."""
    num_experts: Size
    top_k: Size | None
    passes: Size
    sources: Size | None = None
    """Stored by former releases (`sources.parquet`); not read."""
    sampled_tokens: Size | None = None
    """Tokens whose choices were kept; absent where none were."""
    transitions: Literal["all_pairs", "top1", "rank_aligned"] | None = None
    """Pairs of experts that count as a transition; absent where none were recorded."""
    coactivation: bool = False
    """Stored by former releases (`coactivation.parquet`); not read."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every array that there is, by field of `Recording`."""
        layers, experts = len(self.layer_ids), self.num_experts
        shapes: dict[str, tuple[int, ...]] = {"count_PLE": (self.passes, layers, experts)}
        if self.transitions is not None:
            shapes["transition_MEE"] = (layers - 1, experts, experts)
        if self.sampled_tokens is not None:
            shapes["token_LTK"] = (layers, self.sampled_tokens, self.top_k or 0)
        return shapes


def read_recording(path: Path) -> Recording:
    """Read whatever recording profilers/routing/formats.py recognises, a stored one among them.

    Args:
        path: a folder or file; its content, not its name, says what it is.

    Raises:
        RecordingUnreadableError: it is missing, damaged, or nothing that is known.
    """
    from profilers.routing.formats import read_as, recognised

    return read_as(recognised(path), path)


def holds_recording(path: Path) -> bool:
    """Return whether there is a header to read, readable or not."""
    return os.path.lexists(path / HEADER_NAME)


def read(path: Path) -> Recording:
    """Read a stored recording.

    Raises:
        RecordingUnreadableError: anything in it is missing, damaged or of another schema version.
    """
    from profilers.routing.tables import read_array

    header = read_header(path)
    arrays: dict[str, Any] = {}
    for name, shape in header.shapes().items():
        table = TABLES[name]
        with unreadable(path / table.file):
            require_room(*shape)
            array = read_array(path / table.file, axes=table.axes, shape=shape, dtype=table.dtype)
            whole = table.dtype is not np.float64
            axes = " ".join((*table.axes, "values"))
            checked = numbers(array, what="values", axes=axes, are_whole=whole)
            arrays[name] = checked.astype(table.dtype, copy=False)
    with unreadable(path / HEADER_NAME):
        return Recording(
            model=header.model,
            workload=header.workload,
            layer_ids=header.layer_ids,
            top_k=header.top_k,
            num_decoder_layers=header.decoder_layers,
            transition_kind=header.transitions or "all_pairs",
            **arrays,
        )


def read_header(path: Path) -> RecordingHeader:
    """Read only `recording.json`: what was recorded and how much of it.

    Raises:
        RecordingUnreadableError: it is missing, damaged or of another schema version.
    """
    file = path / HEADER_NAME
    with unreadable(file):
        try:
            content = read_bounded(file, most_bytes=MAX_HEADER_BYTES)
            return RecordingHeader.model_validate_json(content, strict=True)
        except ValidationError as error:
            raise ValueError(
                f"{first_problem(error)}; it was edited, damaged or written by another release"
            ) from error


def write_recording(
    path: Path, recording: Recording, *, origin: str = "", created: str = ""
) -> None:
    """Write a recording; one that the folder holds is replaced.

    Args:
        path: its folder; one that holds other things is refused.
        recording: what to write.
        origin: how it was made, in a few words.
        created: the moment, ISO 8601 in UTC.

    Raises:
        ProfileUnwritableError: the disk does not take it, or other things lie there.
    """
    ours = {HEADER_NAME, *FORMER, *(table.file for table in TABLES.values())}
    if path.exists() and not (path.is_dir() and {file.name for file in path.iterdir()} <= ours):
        raise ProfileUnwritableError(
            f"{path} exists and is no recording; choose a folder that does not exist yet"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as beside:
            unfinished = Path(beside) / "new"
            unfinished.mkdir(mode=0o755)
            _fill(unfinished, recording, origin=origin, created=created)
            # An older recording steps aside first and goes afterwards.
            if path.exists():
                path.replace(Path(beside) / "old")
            unfinished.rename(path)
    except OSError as error:
        raise ProfileUnwritableError(
            f"{path} cannot be written: {error.strerror}; choose another folder"
        ) from error


def _fill(folder: Path, recording: Recording, *, origin: str, created: str) -> None:
    from profilers.routing.tables import write_array

    between, tokens = recording.transition_MEE, recording.token_LTK
    kind: Any = recording.transition_kind if between is not None and between.size else None
    header = RecordingHeader(
        moetune_version=moetune_version(),
        created=created,
        origin=origin,
        model=recording.model,
        workload=recording.workload,
        layer_ids=recording.layer_ids,
        decoder_layers=recording.num_decoder_layers,
        num_experts=recording.num_experts,
        top_k=recording.top_k,
        passes=recording.num_passes,
        sampled_tokens=None if tokens is None else tokens.shape[1] or None,
        transitions=kind,
    )
    for name, table in TABLES.items():
        array = getattr(recording, name)
        if array is not None and array.size:
            write_array(folder / table.file, array.astype(table.dtype), axes=table.axes)
    with (folder / HEADER_NAME).open("w", encoding="utf-8") as stream:
        stream.write(header.model_dump_json(indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
