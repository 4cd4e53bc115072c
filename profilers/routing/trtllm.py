"""TensorRT-LLM's statistics directory, written while EXPERT_STATISTIC_ITER_RANGE is set.

    meta_info.json            num_experts, num_experts_per_token
    rank<r>.safetensors       a tensor [E] of counts for each key "<iteration>_<layer>"

An iteration is a pass, layers are absolute, experts logical. Ranks are summed: with attention data
parallelism each has tokens of its own.

A safetensors file is a length, a JSON table of where each tensor lies, and the bytes; it is read
here within limits, so nothing has to be installed for it. Source of both formats:
NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/expert_statistic.py; huggingface/safetensors, README.

Not covered: the co-occurrence and raw files of older releases.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from profilers.errors import first_problem
from profilers.files import open_regular, require_regular
from profilers.routing.contents import read_object
from profilers.routing.recording import MOST_EXPERTS, Counts, Recording, numbers
from profilers.routing.tally import Tally

META: Final = "meta_info.json"
MOST_HEADER_BYTES: Final = 2**26
MOST_FILE_BYTES: Final = 2**31

Whole = Annotated[int, Field(ge=0)]
Experts = Annotated[int, Field(ge=1, le=MOST_EXPERTS)]


class _Meta(BaseModel, strict=True):
    num_experts: Experts
    num_experts_per_token: Experts


class _Entry(BaseModel, strict=True):
    """Type, shape and place of a tensor in the bytes after the table."""

    dtype: Literal["I64"]
    shape: tuple[Whole]
    data_offsets: tuple[Whole, Whole]


class _Table(BaseModel, extra="allow"):
    """The table of a file: its tensors by name, and what else the writer noted."""

    __pydantic_extra__: dict[str, _Entry] = Field(init=False)
    metadata: Any = Field(None, alias="__metadata__")


def read(path: Path) -> Recording:
    """Read a directory.

    Raises:
        ValueError: a file is missing, cut short, or holds no such tensors.
    """
    meta = _Meta.model_validate(read_object(path / META))
    files = sorted(path.glob("rank*[0-9].safetensors"))
    if not files:
        raise ValueError("holds no rank<r>.safetensors; name the directory of all ranks")
    tally = Tally()
    for file in files:
        for iteration, layer, count_E in _tensors(file):
            if count_E.size != meta.num_experts:
                raise ValueError(
                    f"{file.name}: {iteration}_{layer} has {count_E.size} experts, {META} says"
                    f" {meta.num_experts}"
                )
            tally.count({layer: count_E}, number=iteration)
    return tally.recording(top_k=meta.num_experts_per_token)


def _tensors(file: Path) -> Iterator[tuple[int, int, Counts]]:
    """Yield the counts of a file by iteration and layer, one at a time."""
    size = require_regular(file, most_bytes=MOST_FILE_BYTES)
    with open_regular(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(MOST_HEADER_BYTES, size - 8):
            raise ValueError(f"{file.name} is no safetensors file, or cut short")
        try:
            table = _Table.model_validate_json(stream.read(length))
        except ValidationError as error:
            raise ValueError(f"{file.name}: {first_problem(error)}") from error
        for key, entry in table.__pydantic_extra__.items():
            match = re.fullmatch(r"(\d{1,9})_(\d{1,9})", key)
            if match is None:
                raise ValueError(f"{file.name}: tensor {key[:40]!r} is not <iteration>_<layer>")
            start, stop = entry.data_offsets
            if stop > size - 8 - length or stop - start != 8 * entry.shape[0]:
                raise ValueError(
                    f"{file.name}: {key} does not lie in the file; it was cut short or damaged"
                )
            stream.seek(8 + length + start)
            values = np.frombuffer(stream.read(stop - start), dtype="<i8")
            what = f"{file.name}: {key}"
            yield int(match[1]), int(match[2]), numbers(values, what=what, axes="experts")
