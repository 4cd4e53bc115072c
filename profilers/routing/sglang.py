"""What SGLang's expert distribution recorder writes, and what `--init-expert-location` takes.

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
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from profilers.routing.json_file import read_object
from profilers.routing.overrides import Naming
from profilers.routing.recording import Counts, Recording
from profilers.routing.tally import ABSENT, Tally
from profilers.routing.tensors import load
from profilers.routing.validation import recording_of, require_room, whole_counts

DUMPS: Final = "expert_distribution_recorder_*.pt"
MOST_FILES: Final = 4096


def is_dump(values: object) -> bool:
    """Whether a file's content is of this layout."""
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
    dimensions: Mapping[str, Any] = content
    return dimensions


def _of_counts(contents: Iterable[Mapping[str, Any]], *, naming: Naming) -> Recording:
    """Recordings by `stat`, one after the other."""
    passes = []
    for content in contents:
        values = content.get("logical_count")
        deep = np.ndim(values) if isinstance(values, np.ndarray) else _depth(values)
        axes = "steps layers experts" if deep == 3 else "layers experts"
        counts = whole_counts(values, what="logical_count", axes=axes)
        passes.append(counts if deep == 3 else counts[None])
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
        map_RP = whole_counts(content.get(what), what=what, axes="layers slots")
        # Every expert has a slot, so the largest id says how many there are.
        dimensions = (map_RP.shape[0], int(map_RP.max()) + 1)
        if tally.is_empty:
            require_room(*dimensions)
            shape, tally = dimensions, Tally(num_experts=dimensions[1])
        if dimensions != shape:
            raise ValueError("ranks disagree in layers or experts; take the dumps of one server")
        for record in _records(content):
            number, rank = (_whole(record, name) for name in ("forward_pass_id", "rank"))
            for layer, count_E in enumerate(_logical(record, map_RP, num_experts=shape[1])):
                tally.count(count_E, layer=layer, number=number, source=rank)
            if "topk_ids_of_layer" in record:
                tally.choose(_choices(record, map_RP))
    return tally.recording(naming=naming, num_decoder_layers=shape[0])


def _logical(
    record: Mapping[str, Any], map_RP: Counts, *, num_experts: int
) -> npt.NDArray[np.int64]:
    what = "global_physical_count"
    physical_RP = whole_counts(record.get(what), what=what, axes="layers slots")
    if physical_RP.shape != map_RP.shape:
        raise ValueError(
            f"{what} is {list(physical_RP.shape)}, last_physical_to_logical_map"
            f" {list(map_RP.shape)}; both are [layers][slots]"
        )
    logical_RE = np.zeros((map_RP.shape[0], num_experts), dtype=np.int64)
    np.add.at(logical_RE, (np.arange(map_RP.shape[0])[:, None], map_RP), physical_RP)
    return logical_RE


def _choices(record: Mapping[str, Any], map_RP: Counts) -> dict[int, npt.NDArray[np.int32]]:
    """Logical ids [T, K] of every layer that has any; K is the most choices that a token made."""
    ids_RTK = np.asarray(record["topk_ids_of_layer"])
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


def _records(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    records = content["records"]
    if not isinstance(records, list) or not all(isinstance(each, Mapping) for each in records):
        raise ValueError("records must be a list of forward passes")
    return records


def _whole(record: Mapping[str, Any], name: str) -> int:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}: {str(value)[:40]!r} is not a whole number of 0 or more")
    return value


def _depth(values: Any) -> int:
    depth = 0
    while isinstance(values, list) and depth < 4:
        depth, values = depth + 1, values[0] if values else None
    return depth
