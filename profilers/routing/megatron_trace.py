"""Megatron-LM's routing trace: what `--moe-routing-trace-path` writes in training and inference.

One `router_trace_rank<r>.jsonl` a rank, one record a line, in order of time:

    {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
     "num_tokens": 128, "topk": 22, "top_indices": [[12, 45, ...], ...]}

Records of one rank that follow each other with ascending layers are one forward of the same tokens;
a step of training has one for each microbatch. A trace may be larger than memory: it is read line
by line, a forward at a time, and kept as counts (profilers/routing/tally.py says how that stays
bounded).

Source: NVIDIA/Megatron-LM at d98e8a6, megatron/core/transformer/moe/router_trace.py. Where the
router hands on a mask, the ids of a token ascend; they are not in order of its preference.

The trace does not say how many experts there are: it is taken from the largest chosen id, unless
the user does. Nor does it number layers across pipeline stages: each stage counts its own from 0,
so the traces of one stage are read at a time, with --layer-ids. Ranks of one tensor-parallel group
without sequence parallelism record the same tokens, which leaves the shares as they are.

Not covered: the layers of multi-token prediction (`block` is not `decoder`), hidden states and
logits beside the trace.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from profilers.errors import first_problem
from profilers.files import open_regular
from profilers.routing.overrides import Naming
from profilers.routing.recording import Recording
from profilers.routing.tally import Tally

TRACES: Final = "router_trace_rank*.jsonl"
MOST_LINE_BYTES: Final = 2**25
"""One layer's choices in one forward: 400,000 tokens of 16 choices."""
MOST_HELD: Final = 2**24
"""Choices of a forward that are kept until its last layer is read: 64 MiB."""
MOST_CELLS: Final = 2**24
"""Counts in memory: 128 MiB; more passes than fit are merged into coarser ones."""
MOST_FILES: Final = 65_536

Ids = npt.NDArray[np.int32]
Whole = Annotated[int, Field(ge=0)]


class _Line(BaseModel, strict=True):
    """One layer of one forward; what else a line says is not read."""

    step: Whole
    layer: Whole
    rank: Whole
    block: str = "decoder"
    num_tokens: Whole | None = None
    top_indices: Any


def read(path: Path, *, naming: Naming) -> Recording:
    """Read the trace of one rank, or a folder with those of several.

    Raises:
        ValueError: a line is cut short, too long, or no such record.
    """
    files = sorted(path.glob(TRACES)) if path.is_dir() else [path]
    if not files or len(files) > MOST_FILES:
        raise ValueError(f"{len(files)} files of {TRACES}; there must be 1 to {MOST_FILES}")
    tally = Tally(num_experts=naming.num_experts, most_cells=MOST_CELLS)
    for file in files:
        _add_trace(file, tally)
    return tally.recording(naming=naming)


def _add_trace(file: Path, tally: Tally) -> None:
    step, rank, num_held = -1, 0, 0
    forward: dict[int, Ids] = {}
    for where, line in _lines(file):
        ids_TK = _ids(line, where)
        start = line.step != step or line.rank != rank or line.layer <= max(forward, default=-1)
        if forward and (start or num_held + ids_TK.size > MOST_HELD):
            _add(tally, forward, step=step, where=where)
            forward, num_held = {}, 0
        step, rank, num_held = line.step, line.rank, num_held + ids_TK.size
        if ids_TK.size:
            forward[line.layer] = ids_TK
    if forward:
        _add(tally, forward, step=step, where=file.name)


def _add(tally: Tally, forward: dict[int, Ids], *, step: int, where: str) -> None:
    try:
        tally.add(forward, number=step)
    except ValueError as error:
        raise ValueError(f"before {where}: {error}") from error


def _lines(file: Path) -> Iterator[tuple[str, _Line]]:
    """Yield where each line of the decoder's layers is, and what it says."""
    with open_regular(file) as stream:
        number = 0
        while text := stream.readline(MOST_LINE_BYTES + 1):
            number += 1
            where = f"{file.name} line {number}"
            if len(text) > MOST_LINE_BYTES:
                raise ValueError(
                    f"{where} has more than {MOST_LINE_BYTES} bytes; a record is one layer of one"
                    " forward"
                )
            if not text.strip():
                continue
            try:
                line = _Line.model_validate_json(text)
            except ValidationError as error:
                raise ValueError(
                    f"{where}: {first_problem(error)}; remove a line that was cut short"
                ) from error
            if line.block == "decoder":
                yield where, line


def _ids(line: _Line, where: str) -> Ids:
    if line.top_indices == []:
        return np.zeros((0, 1), dtype=np.int32)
    try:
        ids_TK = np.asarray(line.top_indices)
    except ValueError as error:
        raise ValueError(f"{where}: top_indices has tokens of different choices") from error
    if ids_TK.ndim != 2 or ids_TK.dtype.kind not in "iu":
        raise ValueError(f"{where}: top_indices must be whole numbers [tokens][choices]")
    if ids_TK.size and not -1 <= ids_TK.min() <= ids_TK.max() < 2**31:
        raise ValueError(f"{where}: top_indices holds an id that is no expert's")
    if line.num_tokens not in (None, len(ids_TK)):
        raise ValueError(f"{where}: {len(ids_TK)} tokens, num_tokens says {line.num_tokens}")
    return ids_TK.astype(np.int32)
