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
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from pydantic import Field, ValidationError, field_validator

from profilers.errors import ProfileUnwritableError, RecordingUnreadableError, first_problem
from profilers.files import read_bounded
from profilers.records import Record
from profilers.routing.overrides import Naming
from profilers.routing.recording import Recording
from profilers.routing.validation import MOST_CELLS, renamed
from profilers.schema_version import moetune_version

SCHEMA_VERSION: Final = 1
# 1: first release.

HEADER_NAME: Final = "recording.json"
FOLDER: Final = "routing"
"""Folder of recordings inside a profile's; it has one folder for each workload."""
MAX_HEADER_BYTES: Final = 2**20
FORMER: Final = ("coactivation.parquet", "sources.parquet")
"""Tables of former releases."""

WORKLOAD: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")
"""Names of workloads in a profile, where each is the name of a folder."""

Size = Annotated[int, Field(ge=1, le=MOST_CELLS)]


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

    schema_version: int = SCHEMA_VERSION
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

    @field_validator("schema_version")
    @classmethod
    def _known_version(cls, value: Any) -> Any:
        if value != SCHEMA_VERSION:
            raise ValueError(f"schema_version {value} is not {SCHEMA_VERSION}")
        return value

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every array that there is, by field of `Recording`."""
        layers, experts = len(self.layer_ids), self.num_experts
        shapes: dict[str, tuple[int, ...]] = {"count_PLE": (self.passes, layers, experts)}
        if self.transitions is not None:
            shapes["transition_MEE"] = (layers - 1, experts, experts)
        if self.sampled_tokens is not None:
            shapes["token_LTK"] = (layers, self.sampled_tokens, self.top_k or 0)
        return shapes


def read_recording(path: Path, *, naming: Naming | None = None) -> Recording:
    """Read a stored recording, or whatever dump profilers/routing/formats.py recognises.

    Args:
        path: a folder or file; its content, not its name, says what it is.
        naming: facts that it leaves unsaid, or says otherwise.

    Raises:
        RecordingUnreadableError: it is missing, damaged, or nothing that is known.
    """
    from profilers.routing.formats import read_as, recognised

    naming = naming or Naming()
    inside = (path,) if holds_recording(path) else stored_below(path)
    if len(inside) > 1:
        names = ", ".join(str(each.relative_to(path)) for each in inside[:8])
        raise RecordingUnreadableError(f"{path} holds {len(inside)} recordings: name one, {names}")
    if not inside:
        return read_as(recognised(path), path, naming=naming)
    try:
        return renamed(read_stored(inside[0]), naming)
    except ValueError as error:
        raise RecordingUnreadableError(f"{inside[0]}: {error}") from error


def stored_below(path: Path) -> tuple[Path, ...]:
    """The recordings that a profile's folder holds, by name of the workload."""
    return tuple(sorted(file.parent for file in path.glob(f"{FOLDER}/*/{HEADER_NAME}")))


def holds_recording(path: Path) -> bool:
    """Return whether there is a header to read, readable or not."""
    return os.path.lexists(path / HEADER_NAME)


def read_stored(path: Path) -> Recording:
    """Read a stored recording.

    Raises:
        RecordingUnreadableError: anything in it is missing, damaged or of another schema version.
    """
    from profilers.routing.tables import read_array

    header = read_header(path)
    arrays = {}
    for name, shape in header.shapes().items():
        table = TABLES[name]
        try:
            if 0 in shape or np.prod([float(size) for size in shape]) > MOST_CELLS:
                raise ValueError(f"shape {shape} is empty or of more than {MOST_CELLS} numbers")
            arrays[name] = read_array(
                path / table.file, axes=table.axes, shape=shape, dtype=table.dtype
            )
            if (arrays[name] < 0).any() or not np.isfinite(arrays[name]).all():
                raise ValueError("a value is negative or not finite")
        except ValueError as error:
            raise RecordingUnreadableError(
                f"{path / table.file}: {error}; record or import it anew"
            ) from error
    try:
        return Recording(
            model=header.model,
            workload=header.workload,
            layer_ids=header.layer_ids,
            top_k=header.top_k,
            num_decoder_layers=header.decoder_layers,
            transition_kind=header.transitions or "all_pairs",
            **arrays,
        )
    except ValueError as error:
        raise RecordingUnreadableError(f"{path / HEADER_NAME}: {error}") from error


def read_header(path: Path) -> RecordingHeader:
    """Read only `recording.json`: what was recorded and how much of it.

    Raises:
        RecordingUnreadableError: it is missing, damaged or of another schema version.
    """
    file = path / HEADER_NAME
    try:
        content = read_bounded(file, most_bytes=MAX_HEADER_BYTES)
        return RecordingHeader.model_validate_json(content, strict=True)
    except OSError as error:
        raise RecordingUnreadableError(f"{file}: {error.strerror}") from error
    except ValidationError as error:
        raise RecordingUnreadableError(
            f"{file}: {first_problem(error)}; it was edited, damaged or written by another release"
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
    if path.exists() and not _is_ours(path):
        raise ProfileUnwritableError(
            f"{path} exists and is no recording; choose a folder that does not exist yet"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            _fill(unfinished, recording, origin=origin, created=created)
            _take_place(unfinished, path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise ProfileUnwritableError(
            f"{path} cannot be written: {error.strerror}; choose another folder"
        ) from error


def header_of(recording: Recording, *, origin: str = "", created: str = "") -> RecordingHeader:
    """Return the header that `recording.json` holds for a recording."""
    between, tokens = recording.transition_MEE, recording.token_LTK
    kind: Any = recording.transition_kind if between is not None and between.size else None
    return RecordingHeader(
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


def _fill(folder: Path, recording: Recording, *, origin: str, created: str) -> None:
    from profilers.routing.tables import write_array

    header = header_of(recording, origin=origin, created=created)
    for name, table in TABLES.items():
        array = getattr(recording, name)
        if array is not None and array.size:
            write_array(folder / table.file, array.astype(table.dtype), axes=table.axes)
    with (folder / HEADER_NAME).open("w", encoding="utf-8") as stream:
        stream.write(header.model_dump_json(indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    folder.chmod(0o755)


def _take_place(unfinished: Path, path: Path) -> None:
    """Rename it into place; an older recording steps aside first and goes afterwards."""
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        if path.exists():
            path.replace(aside)
        unfinished.rename(path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    ours = {HEADER_NAME, *FORMER, *(table.file for table in TABLES.values())}
    return path.is_dir() and {each.name for each in path.iterdir()} <= ours
