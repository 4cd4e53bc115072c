"""Megatron-LM's routing trace: what `--moe-routing-trace-path` writes in training and inference.

One `router_trace_rank<r>.jsonl` a rank, one record a line, in order of time:

    {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
     "num_tokens": 128, "topk": 22, "top_indices": [[12, 45, ...], ...]}

Records of one rank that follow each other with ascending layers are one forward of the same tokens;
a step of training has one for each microbatch. A trace may be larger than memory: it is read line
by line, a forward at a time, and kept as counts (profilers/routing/choices.py says how that stays
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

import json
import operator
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from profilers.files import open_regular
from profilers.routing.choices import Tally
from profilers.routing.overrides import Naming
from profilers.routing.recording import Recording

TRACES: Final = "router_trace_rank*.jsonl"
MOST_LINE_BYTES: Final = 2**25
"""One layer's choices in one forward: 400,000 tokens of 16 choices."""
MOST_HELD: Final = 2**24
"""Choices of a forward that are kept until its last layer is read: 64 MiB."""
MOST_CELLS: Final = 2**24
"""Counts in memory: 128 MiB; more passes than fit are merged into coarser ones."""
MOST_FILES: Final = 65_536
MOST_DIGITS: Final = 8
"""Of an id that is parsed quickly."""
_count_commas: Final = operator.methodcaller("count", b",")
KEY: Final = b'"top_indices": '

Ids = npt.NDArray[np.int32]


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
    step, source, num_held = -1, 0, 0
    forward: dict[int, Ids] = {}
    for number, record in _records(file):
        where = f"{file.name} line {number}"
        if record.get("block", "decoder") != "decoder":
            continue
        layer, now, rank = (_whole(record, name, where) for name in ("layer", "step", "rank"))
        ids_TK = _ids(record, where)
        start = now != step or rank != source or layer <= max(forward, default=-1)
        if forward and (start or num_held + ids_TK.size > MOST_HELD):
            _add(tally, forward, step=step, source=source, where=where)
            forward, num_held = {}, 0
        step, source, num_held = now, rank, num_held + ids_TK.size
        if ids_TK.size:
            forward[layer] = ids_TK
    if forward:
        _add(tally, forward, step=step, source=source, where=file.name)


def _add(tally: Tally, forward: dict[int, Ids], *, step: int, source: int, where: str) -> None:
    try:
        tally.add(forward, number=step, source=source)
    except ValueError as error:
        raise ValueError(f"before {where}: {error}") from error


def _records(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_regular(file) as stream:
        number = 0
        while line := stream.readline(MOST_LINE_BYTES + 1):
            number += 1
            if len(line) > MOST_LINE_BYTES:
                raise ValueError(
                    f"{file.name} line {number} has more than {MOST_LINE_BYTES} bytes; a record is"
                    " one layer of one forward"
                )
            if not line.strip():
                continue
            parsed = _quickly(line)
            if parsed is not None:
                yield number, parsed
                continue
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ValueError(
                    f"{file.name} line {number} is no JSON, or cut short; remove the line"
                ) from error
            if not isinstance(record, dict):
                raise ValueError(f"{file.name} line {number} is no record")  # noqa: TRY004
            yield number, record


def _quickly(line: bytes) -> dict[str, Any] | None:
    """Parse a line whose choices are plain rows of ids; None if a real parser has to decide.

    Nearly all of a trace is ids, and parsing them as JSON takes most of the time of reading it.
    """
    start, stop = line.find(KEY), line.rfind(b"]]") + 2
    if start < 0 or stop < 2:
        return None
    ids_TK = rows_of_ids(line[start + len(KEY) : stop])
    if ids_TK is None:
        return None
    try:
        record = json.loads(line[: start + len(KEY)] + b"null" + line[stop:])
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(record, dict) or "top_indices" not in record:
        return None
    return record | {"top_indices": ids_TK}


def rows_of_ids(text: bytes) -> npt.NDArray[np.int64] | None:
    """`[[12, 45], [3, 7]]` as an array; None unless it is exactly rows of equally many ids."""
    comma = b", " if b" " in text else b","
    rows = text[2:-2].split(b"]" + comma + b"[")
    cells = set(map(_count_commas, rows))
    inside = comma.join(rows)
    if not (text.startswith(b"[[") and text.endswith(b"]]") and len(cells) == 1):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ids = np.fromstring(inside, dtype=np.int64, sep=",")
    except (ValueError, DeprecationWarning):
        # Which of the two it is depends on numpy's release.
        return None
    # Whatever numpy is lenient about, an empty cell say, has another length than the ids written
    # out again.
    digits = ids.size + sum(int((ids >= 10**place).sum()) for place in range(1, MOST_DIGITS))
    is_exact = len(inside) == digits + (ids.size - 1) * len(comma)
    if not is_exact or ids.size != len(rows) * (cells.pop() + 1):
        return None
    return ids.reshape(len(rows), -1)


def _ids(record: dict[str, Any], where: str) -> Ids:
    values = record.get("top_indices")
    if isinstance(values, list) and not values:
        return np.zeros((0, 1), dtype=np.int32)
    try:
        ids_TK = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{where}: top_indices has tokens of different choices") from error
    if ids_TK.ndim != 2 or ids_TK.dtype.kind not in "iu":
        raise ValueError(f"{where}: top_indices must be whole numbers [tokens][choices]")
    if ids_TK.size and not -1 <= ids_TK.min() <= ids_TK.max() < 2**31:
        raise ValueError(f"{where}: top_indices holds an id that is no expert's")
    if record.get("num_tokens", len(ids_TK)) != len(ids_TK):
        raise ValueError(f"{where}: {len(ids_TK)} tokens, num_tokens says {record['num_tokens']}")
    return ids_TK.astype(np.int32)


def _whole(record: dict[str, Any], name: str, where: str) -> int:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{where}: {name} {str(value)[:40]!r} is not a whole number of 0 or more")
    return value
