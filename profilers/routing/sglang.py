"""Formats of SGLang's expert distribution recorder and of `--init-expert-location`.

    stat, stat_approx    one `.pt` (or JSON): `logical_count` [steps][layers][E], summed over ranks
    per_pass             a `.pt` a rank: `records`, `last_physical_to_logical_map` [layers][P];
                         a record has `forward_pass_id`, `rank`, `global_physical_count` [layers][P]
    per_token            the same with `topk_ids_of_layer` [layers][tokens][8], physical ids, -1
                         where there is no choice

Ranks of one pass are summed by `forward_pass_id`; a folder with the dumps of all ranks is read as
one recording. Physical experts become logical ones with the map of the same file. Every decoder
layer has a row; those of dense layers are zero and left out.

Source: sgl-project/sglang, python/sglang/srt/eplb/expert_distribution.py, release 0.5.

Not covered: a placement that changed while it was recorded; SGLang keeps only the last map. Layers
of a per_token record that hold no choice at all count as dense.
"""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from profilers.routing.json_file import read_object
from profilers.routing.overrides import Naming
from profilers.routing.recording import Counts, Recording
from profilers.routing.tally import ABSENT, Tally
from profilers.routing.tensors import load
from profilers.routing.validation import recording_of, require_room, whole_counts

DUMPS: Final = "expert_distribution_recorder_*.pt"
MOST_FILES: Final = 4096

Whole = Annotated[int, Field(ge=0)]


class _Record(BaseModel, strict=True):
    """One forward pass on one rank."""

    forward_pass_id: Whole
    global_physical_count: Any
    topk_ids_of_layer: Any = None


class _Dump(BaseModel, strict=True):
    """Dump that a rank writes by `per_pass` or `per_token`."""

    records: list[_Record]
    last_physical_to_logical_map: Any


def is_dump(values: object) -> bool:
    """Return whether a file's content is of this layout."""
    return isinstance(values, Mapping) and ("logical_count" in values or "records" in values)


def read(path: Path, *, naming: Naming) -> Recording:
    """Read a dump, or a folder of them.

    Raises:
        ValueError: a field is missing, of another shape, or no count.
    """
    if path.suffix == ".json":
        return _of_counts([read_object(path)], naming=naming)
    files = sorted(path.glob(DUMPS)) if path.is_dir() else [path]
    if not files or len(files) > MOST_FILES:
        raise ValueError(f"{len(files)} files of {DUMPS}; there must be 1 to {MOST_FILES}")
    first = load(files[0])
    kind = "records" if isinstance(first, Mapping) and "records" in first else "logical_count"
    contents = itertools.chain([first], map(load, files[1:]))
    checked = (_of_kind(each, kind, file) for each, file in zip(contents, files, strict=True))
    return (_of_records if kind == "records" else _of_counts)(checked, naming=naming)


def _of_kind(content: Any, kind: str, file: Path) -> Mapping[str, Any]:
    if not is_dump(content):
        raise ValueError(f"{file.name} has neither `logical_count` nor `records`")
    if kind not in content:
        raise ValueError("dumps of stat and of per_pass side by side; name one of the files")
    return dict(content)


def _of_counts(contents: Iterable[Mapping[str, Any]], *, naming: Naming) -> Recording:
    """Recordings by `stat`, one after the other."""
    passes = []
    for content in contents:
        what = "logical_count"
        passes.append(
            whole_counts(content.get(what), what=what, axes="layers experts", first="steps")
        )
    if len({each.shape[1:] for each in passes}) > 1:
        shapes = sorted({each.shape[1:] for each in passes})
        raise ValueError(f"dumps of different models: layers and experts are {shapes}")
    joined = np.concatenate(passes)
    # The recorder's buffer has steps in which nothing was served.
    used = joined[joined.any(axis=(1, 2))]
    return recording_of(
        used if used.size else joined, naming=naming, num_decoder_layers=joined.shape[1]
    )


def _of_records(contents: Iterable[Mapping[str, Any]], *, naming: Naming) -> Recording:
    """Recordings by `per_pass` or `per_token`; one rank's dump is in memory at a time."""
    what = "last_physical_to_logical_map"
    tally, shape = Tally(), (0, 0)
    for content in contents:
        dump = _Dump.model_validate(content)
        map_RP = whole_counts(dump.last_physical_to_logical_map, what=what, axes="layers slots")
        # Every expert has a slot, so the largest id says how many there are.
        dimensions = (map_RP.shape[0], int(map_RP.max()) + 1)
        if tally.is_empty:
            require_room(*dimensions)
            shape, tally = dimensions, Tally(num_experts=dimensions[1])
        if dimensions != shape:
            raise ValueError("ranks disagree in layers or experts; take the dumps of one server")
        for record in dump.records:
            for layer, count_E in enumerate(_logical(record, map_RP, num_experts=shape[1])):
                tally.count(count_E, layer=layer, number=record.forward_pass_id)
            if record.topk_ids_of_layer is not None:
                tally.choose(_choices(record.topk_ids_of_layer, map_RP))
    return tally.recording(naming=naming, num_decoder_layers=shape[0])


def _logical(record: _Record, map_RP: Counts, *, num_experts: int) -> Counts:
    what = "global_physical_count"
    physical_RP = whole_counts(record.global_physical_count, what=what, axes="layers slots")
    if physical_RP.shape != map_RP.shape:
        raise ValueError(
            f"{what} is {list(physical_RP.shape)}, last_physical_to_logical_map"
            f" {list(map_RP.shape)}; both are [layers][slots]"
        )
    logical_RE = np.zeros((map_RP.shape[0], num_experts), dtype=np.int64)
    np.add.at(logical_RE, (np.arange(map_RP.shape[0])[:, None], map_RP), physical_RP)
    return logical_RE


def _choices(slots: Any, map_RP: Counts) -> dict[int, npt.NDArray[np.int32]]:
    """Logical ids [T, K] of every layer that has any; K is the most choices that a token made."""
    ids_RTK = np.asarray(slots)
    if ids_RTK.ndim != 3 or ids_RTK.shape[0] != map_RP.shape[0] or ids_RTK.dtype.kind not in "iu":
        raise ValueError(
            f"topk_ids_of_layer is {ids_RTK.dtype} {list(ids_RTK.shape)}; it must be whole numbers"
            f" [{map_RP.shape[0]} layers][tokens][choices]"
        )
    if ids_RTK.size == 0:
        return {}
    if ids_RTK.max() >= map_RP.shape[1] or ids_RTK.min() < ABSENT:
        raise ValueError(f"topk_ids_of_layer holds a slot that is not one of {map_RP.shape[1]}")
    made = ids_RTK >= 0
    width = int(made.sum(axis=2).max())
    layers = np.arange(map_RP.shape[0])[:, None, None]
    logical = np.where(made, map_RP[layers, np.maximum(ids_RTK, 0)], ABSENT).astype(np.int32)
    return {
        int(row): np.ascontiguousarray(logical[row, :, :width])
        for row in np.flatnonzero(made.any(axis=(1, 2)))
    }
