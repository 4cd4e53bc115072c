"""TensorRT-LLM's statistics directory, written while EXPERT_STATISTIC_ITER_RANGE is set.

    meta_info.json            num_experts, num_experts_per_token
    rank<r>.safetensors       a tensor [E] of counts for each key "<iteration>_<layer>"
    rank<r>_raw.safetensors   the chosen experts [tokens][choices] under the same keys, where they
                              were recorded too

An iteration is a pass, layers are absolute, experts logical. Ranks are summed: with attention data
parallelism each has tokens of its own.

A safetensors file is a length, a JSON table of where each tensor lies, and the bytes; it is read
here within limits, so nothing has to be installed for it. Source of both formats:
NVIDIA/TensorRT-LLM, examples/wide_ep/ep_load_balancer; huggingface/safetensors, README.

Not covered: the co-occurrence files of older releases.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from profilers.errors import first_problem
from profilers.files import open_regular, require_regular
from profilers.routing.json_file import read_object
from profilers.routing.overrides import Naming
from profilers.routing.recording import Recording
from profilers.routing.tally import Tally
from profilers.routing.validation import whole_counts

META: Final = "meta_info.json"
MOST_HEADER_BYTES: Final = 2**26
MOST_FILE_BYTES: Final = 2**31
MOST_FILES: Final = 4096
DTYPES: Final[Mapping[str, str]] = {
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "U8": "|u1",
    "F64": "<f8",
    "F32": "<f4",
}

Whole = Annotated[int, Field(ge=0)]


class _Meta(BaseModel, strict=True):
    num_experts: Annotated[int, Field(ge=1)]
    num_experts_per_token: Annotated[int, Field(ge=1)]


class _Entry(BaseModel, strict=True):
    """Type, shape and place of a tensor in the bytes after the table."""

    dtype: Literal["I64", "I32", "I16", "U8", "F64", "F32"]
    shape: list[Whole]
    data_offsets: tuple[Whole, Whole]


class _Table(BaseModel, extra="allow"):
    """The table of a file: its tensors by name, and what else the writer noted."""

    __pydantic_extra__: dict[str, _Entry] = Field(init=False)
    metadata: Any = Field(None, alias="__metadata__")


Tensors = Iterator[tuple[int, int, npt.NDArray[Any]]]


def read(path: Path, *, naming: Naming) -> Recording:
    """Read a directory.

    Raises:
        ValueError: a file is missing, cut short, or holds no such tensors.
    """
    meta = _Meta.model_validate(read_object(path / META))
    num_experts, top_k = meta.num_experts, meta.num_experts_per_token
    counts, raw = (
        _rank_files(path, r"rank(\d+)\.safetensors"),
        _rank_files(path, r"rank(\d+)_raw\.safetensors"),
    )
    if not counts and not raw:
        raise ValueError("holds no rank<r>.safetensors; name the directory of all ranks")
    tally = Tally(num_experts=num_experts)
    for file in counts:
        for iteration, layer, values in _tensors(file):
            what = f"{file.name}: {iteration}_{layer}"
            count_E = whole_counts(values, what=what, axes="experts")
            if count_E.size != num_experts:
                raise ValueError(f"{what} has {count_E.size} experts, {META} says {num_experts}")
            tally.count(count_E, layer=layer, number=iteration)
    _choose(raw, tally, is_counted=bool(counts))
    return tally.recording(naming=naming, top_k=top_k)


def _choose(files: Sequence[Path], tally: Tally, *, is_counted: bool) -> None:
    for file in files:
        forward: dict[int, dict[int, npt.NDArray[np.int32]]] = {}
        for iteration, layer, values in _tensors(file):
            if values.dtype.kind not in "iu":
                raise ValueError(f"{file.name}: {iteration}_{layer} holds no expert ids")
            forward.setdefault(iteration, {})[layer] = values.astype(np.int32)
        for iteration in sorted(forward):
            if is_counted:
                tally.choose(forward[iteration])
            else:
                tally.add(forward[iteration], number=iteration)


def _rank_files(path: Path, pattern: str) -> list[Path]:
    ranks_found = {
        int(match.group(1)): file
        for file in sorted(path.iterdir())
        if (match := re.fullmatch(pattern, file.name))
    }
    if len(ranks_found) > MOST_FILES:
        raise ValueError(f"{len(ranks_found)} ranks; at most {MOST_FILES} are read")
    return [ranks_found[rank] for rank in sorted(ranks_found)]


def _tensors(file: Path) -> Tensors:
    """Every tensor of a safetensors file by iteration and layer, one at a time."""
    size = require_regular(file, most_bytes=MOST_FILE_BYTES)
    with open_regular(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"{file.name} is no safetensors file, or cut short")
        try:
            table = _Table.model_validate_json(stream.read(length))
        except ValidationError as error:
            reason = first_problem(error)
            raise ValueError(f"{file.name}: its table of tensors is damaged: {reason}") from error
        for key, entry in table.__pydantic_extra__.items():
            match = re.fullmatch(r"(\d{1,9})_(\d{1,9})", key)
            if match is None:
                raise ValueError(f"{file.name}: tensor {key[:40]!r} is not <iteration>_<layer>")
            dtype, (start, stop) = np.dtype(DTYPES[entry.dtype]), entry.data_offsets
            wanted = math.prod(entry.shape) * dtype.itemsize
            if stop > size - 8 - length or stop - start != wanted:
                raise ValueError(
                    f"{file.name}: {key} does not lie in the file; it was cut short or damaged"
                )
            stream.seek(8 + length + start)
            values = np.frombuffer(stream.read(wanted), dtype=dtype).reshape(entry.shape)
            yield int(match.group(1)), int(match.group(2)), values
