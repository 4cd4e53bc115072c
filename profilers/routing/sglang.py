"""Formats of SGLang's expert distribution recorder and of `--init-expert-location`; bare arrays.

    stat, stat_approx    one `.pt` (or JSON): `logical_count` [steps][layers][E], summed over ranks
    per_pass             a `.pt` a rank: `records`, `last_physical_to_logical_map` [layers][S];
                         a record has `forward_pass_id`, `rank`, `global_physical_count` [layers][S]
    per_token            the same with `topk_ids_of_layer` [layers][tokens][8], physical ids, -1
                         where there is no choice
    a bare array         `.npy` or `.pt`: counts [layers][E] or [passes][layers][E], the `weight` of
                         EPLB's call and what vLLM-Ascend's offline script reads; logical experts

Ranks of one pass are summed by `forward_pass_id`; a folder with the dumps of all ranks is read as
one recording. Physical experts become logical ones with the map of the same file. Every decoder
layer has a row; those of dense layers are zero and left out.

Source: sgl-project/sglang, python/sglang/srt/eplb/expert_distribution.py, release 0.5.

Not covered: a placement that changed while it was recorded; SGLang keeps only the last map. Layers
of a per_token record that hold no choice at all count as dense.
"""

from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from pydantic import BaseModel, Field

from profilers.routing.contents import contents
from profilers.routing.recording import (
    MOST_EXPERTS,
    Counts,
    Recording,
    logical_counts,
    numbers,
    recording_of,
)
from profilers.routing.tally import ABSENT, Tally

DUMPS: Final = "expert_distribution_recorder_*.pt"

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


def read(path: Path) -> Recording:
    """Read a dump, or a folder of them; one rank's dump is in memory at a time.

    Raises:
        ValueError: a field is missing, of another shape, or no count.
    """
    tally, recorded, counts, rows = Tally(), set(), [], None
    for content in map(contents, sorted(path.glob(DUMPS)) if path.is_dir() else [path]):
        if isinstance(content, dict) and "records" in content:
            recorded.add(_add_records(_Dump.model_validate(content), tally))
            continue
        what = "logical_count"
        is_dump = isinstance(content, dict) and what in content
        values = content[what] if is_dump else content
        if not is_dump and not isinstance(values, np.ndarray):
            raise ValueError(
                f"holds a {type(values).__name__}; expected {what}, records or one tensor of counts"
            )
        counts.append(numbers(values, what=what, axes="layers experts", first="steps"))
        rows = counts[-1].shape[1] if is_dump else None
    if recorded and counts:
        raise ValueError("dumps of stat and of per_pass side by side; name one of the files")
    shapes = sorted({*recorded, *(count.shape[1:] for count in counts)})
    if len(shapes) > 1:
        raise ValueError(f"dumps of different models: layers and experts are {shapes}")
    if not counts:
        return tally.recording(num_decoder_layers=shapes[0][0] if shapes else None)
    joined = np.concatenate(counts)
    # The recorder's buffer has steps in which nothing was served.
    used = joined[joined.any(axis=(1, 2))]
    return recording_of(used if used.size else joined, num_decoder_layers=rows)


def _add_records(dump: _Dump, tally: Tally) -> tuple[int, int]:
    """Add the passes of one rank; return its number of layers and experts."""
    what, axes = "last_physical_to_logical_map", "layers slots"
    stated = dump.last_physical_to_logical_map
    map_RS = numbers(stated, what=what, axes=axes, largest=MOST_EXPERTS - 1)
    for record in dump.records:
        counts = record.global_physical_count
        physical_RS = numbers(counts, what="global_physical_count", axes=axes)
        if physical_RS.shape != map_RS.shape:
            raise ValueError(
                f"global_physical_count is {list(physical_RS.shape)}, {what}"
                f" {list(map_RS.shape)}; both are [layers][slots]"
            )
        (logical_RE,) = logical_counts(physical_RS[None], map_RS)
        tally.count(dict(enumerate(logical_RE)), number=record.forward_pass_id)
        if record.topk_ids_of_layer is not None:
            tally.choose(_choices(record.topk_ids_of_layer, map_RS))
    return len(map_RS), int(map_RS.max()) + 1


def _choices(slots: Any, map_RS: Counts) -> dict[int, Counts]:
    """Return the logical ids [T, K] of every layer that has any; an idle rank has no token."""
    if isinstance(slots, np.ndarray) and slots.size == 0:
        return {}
    rows, num_slots = map_RS.shape
    what, axes = "topk_ids_of_layer", "layers tokens choices"
    slot_RTK = numbers(slots, what=what, axes=axes, least=ABSENT, largest=num_slots - 1)
    if len(slot_RTK) != rows:
        raise ValueError(f"{what} has {len(slot_RTK)} layers; the map has {rows}")
    made = slot_RTK != ABSENT
    chosen = map_RS[np.arange(rows)[:, None, None], np.maximum(slot_RTK, 0)]
    ids_RTK = np.where(made, chosen, ABSENT)
    return {int(row): ids_RTK[row] for row in np.flatnonzero(made.any(axis=(1, 2)))}
