"""Reads the header of a GGUF file, or of all its shards: metadata, and tensors with their types.

Layout:  ggml-org/ggml, docs/gguf.md, versions 2 and 3, little-endian.
Trust:   a header states its own counts and lengths, so each is bounded before anything is read, and
         the tensors must end where the file does. The data of tensors are never read.
"""

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Final, NamedTuple

from profilers.files import open_regular
from tuner.errors import SpecError
from tuner.spec.files import shown_path, shown_value

Value = str | int | float | bool | tuple[int | float | bool, ...]
Values = dict[str, Value]


class TensorType(NamedTuple):
    """How a type of tensors is stored."""

    name: str
    block: int
    """Elements of one block."""
    block_bytes: int

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row."""
        return elements // self.block * self.block_bytes


TENSOR_TYPES: Final[Mapping[int, TensorType]] = {
    number: TensorType(name, block, block_bytes)
    for number, name, block, block_bytes in (
        (0, "f32", 1, 4),
        (1, "f16", 1, 2),
        (2, "q4_0", 32, 18),
        (3, "q4_1", 32, 20),
        (6, "q5_0", 32, 22),
        (7, "q5_1", 32, 24),
        (8, "q8_0", 32, 34),
        (10, "q2_k", 256, 84),
        (11, "q3_k", 256, 110),
        (12, "q4_k", 256, 144),
        (13, "q5_k", 256, 176),
        (14, "q6_k", 256, 210),
        (16, "iq2_xxs", 256, 66),
        (17, "iq2_xs", 256, 74),
        (18, "iq3_xxs", 256, 98),
        (19, "iq1_s", 256, 50),
        (20, "iq4_nl", 32, 18),
        (21, "iq3_s", 256, 110),
        (22, "iq2_s", 256, 82),
        (23, "iq4_xs", 256, 136),
        (24, "i8", 1, 1),
        (25, "i16", 1, 2),
        (26, "i32", 1, 4),
        (27, "i64", 1, 8),
        (28, "f64", 1, 8),
        (29, "iq1_m", 256, 56),
        (30, "bf16", 1, 2),
        (34, "tq1_0", 256, 54),
        (35, "tq2_0", 256, 66),
        (39, "mxfp4", 32, 17),
        (40, "nvfp4", 64, 36),
    )
}
"""Types by their number (ggml.h of b11434)."""

_SCALARS: Final[Mapping[int, str]] = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MOST_ENTRIES = 100_000
"""Most metadata keys, or tensors, of one file."""
_MOST_TEXT_BYTES = 16_000_000
"""Longest text: chat templates are the longest that there are."""
_MOST_KEPT = 4096
"""Longest array that is kept, as layers have; a vocabulary is passed over."""
_MOST_ELEMENTS = 4_000_000
_MOST_SHARDS = 1000
_LONGEST_NAME = 63
_SHARD: Final = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


class Tensor(NamedTuple):
    """A tensor as the header describes it."""

    name: str
    shape: tuple[int, ...]
    """Sizes, the contiguous one first."""
    kind: TensorType
    num_bytes: int
    offset: int
    """Bytes from the start of its file."""
    shard: int


@dataclass(frozen=True, slots=False, kw_only=True)
class GgufFile:
    """The header of a model's file, or of all its shards."""

    paths: tuple[Path, ...]
    file_bytes: int
    """Bytes of all files."""
    values: Values
    """Metadata without long arrays; of the first shard."""
    tensors: tuple[Tensor, ...]

    @property
    def architecture(self) -> str:
        """Name of the architecture in the engine."""
        return str(self.values["general.architecture"])

    @cached_property
    def by_layer(self) -> Mapping[int, tuple[Tensor, ...]]:
        """Tensors by the number of their layer; -1: of no layer."""
        layers: dict[int, list[Tensor]] = {}
        for tensor in self.tensors:
            match = re.match(r"blk\.(\d{1,4})\.", tensor.name)
            layers.setdefault(int(match[1]) if match else -1, []).append(tensor)
        return {layer: tuple(tensors) for layer, tensors in layers.items()}


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file, or of all shards when it is one of several.

    Raises:
        SpecError: a file is missing, damaged, or of another model than the first.
    """
    paths = _shards(path)
    headers = [_read(shard_path, shard) for shard, shard_path in enumerate(paths)]
    values = headers[0][0]
    stated = values.get("split.count", 1)
    if stated != len(paths):
        raise SpecError(
            f"{shown_path(path)}: the header counts {stated} shards and the name {len(paths)}; take"
            " files of one download"
        )
    for shard, (other_values, _, _) in enumerate(headers):
        if len(paths) > 1 and (
            other_values.get("split.no") != shard or other_values.get("split.count") != stated
        ):
            raise SpecError(
                f"{shown_path(paths[shard])}: its header is not that of shard {shard + 1} of"
                f" {stated}; take files of one download"
            )
    tensors = tuple(tensor for header in headers for tensor in header[1])
    total = values.get("split.tensors.count", len(tensors))
    names = {tensor.name for tensor in tensors}
    if total != len(tensors) or len(names) != len(tensors):
        raise SpecError(
            f"{shown_path(path)}: {len(names)} different tensors in {len(paths)} shards, where the"
            f" first states {total}; the shards are of different models"
        )
    return GgufFile(
        paths=paths,
        file_bytes=sum(size for _, _, size in headers),
        values=values,
        tensors=tensors,
    )


def _shards(path: Path) -> tuple[Path, ...]:
    match = _SHARD.match(path.name)
    if match is None:
        return (path,)
    count = int(match[3])
    if not 1 <= count <= _MOST_SHARDS:
        raise SpecError(f"{shown_path(path)}: {count} shards; 1 to {_MOST_SHARDS} are read")
    paths = tuple(
        path.with_name(f"{match[1]}-{shard:05d}-of-{match[3]}.gguf")
        for shard in range(1, count + 1)
    )
    missing = [shard_path.name for shard_path in paths if not shard_path.is_file()]
    if missing:
        raise SpecError(
            f"{shown_path(path)}: {len(missing)} of {count} shards missing, the first"
            f" {shown_value(missing[0])}; put all into one folder"
        )
    return paths


def _read(path: Path, shard: int) -> tuple[Values, tuple[Tensor, ...], int]:
    """Return metadata, tensors and the size of a file."""
    shown = shown_path(path)
    try:
        with open_regular(path) as file:
            reader = _Reader(file)
            return (*_header(reader, shard), reader.size)
    except OSError as error:
        raise SpecError(f"{shown}: {error.strerror or error}; name a GGUF file") from error
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        raise SpecError(f"{shown}: {error}; not a whole GGUF file of version 2 or 3") from error


class _Reader:
    """A file read from its start, no value beyond its end."""

    def __init__(self, file: BufferedReader) -> None:
        self.file = file
        self.size = file.seek(0, 2)
        file.seek(0)

    def take(self, count: int) -> bytes:
        if count > self.size - self.file.tell():
            raise ValueError(f"{count} bytes at {self.file.tell()} are beyond its end")
        return self.file.read(count)

    def skip(self, count: int) -> None:
        if count > self.size - self.file.tell():
            raise ValueError(f"{count} bytes at {self.file.tell()} are beyond its end")
        self.file.seek(count, 1)

    def number(self, layout: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return value

    def count(self, layout: str, *, limit: int, what: str) -> int:
        value = int(self.number(layout))
        if value > limit:
            raise ValueError(f"{value} {what}, where {limit} are the most")
        return value

    def text(self) -> str:
        return self.take(self.count("<Q", limit=_MOST_TEXT_BYTES, what="bytes of text")).decode()


def _header(reader: _Reader, shard: int) -> tuple[Values, tuple[Tensor, ...]]:
    if reader.take(4) != b"GGUF":
        raise ValueError("it does not start with GGUF")
    version = int(reader.number("<I"))
    if version not in (2, 3):
        raise ValueError(f"version {version}")
    num_tensors = reader.count("<Q", limit=_MOST_ENTRIES, what="tensors")
    num_values = reader.count("<Q", limit=_MOST_ENTRIES, what="metadata keys")
    values: Values = {}
    for _ in range(num_values):
        key = reader.text()
        value = _value(reader)
        if value is not None:
            values[key] = value
    infos = [_tensor_info(reader) for _ in range(num_tensors)]
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
        raise ValueError(f"alignment {alignment!r}")
    start = math.ceil(reader.file.tell() / alignment) * alignment
    tensors = tuple(
        Tensor(name, shape, kind, num_bytes, start + offset, shard)
        for name, shape, kind, num_bytes, offset in infos
    )
    for tensor in tensors:
        if tensor.offset + tensor.num_bytes > reader.size:
            raise ValueError(f"tensor {tensor.name!r:.60} ends beyond the file")
    return values, tensors


def _value(reader: _Reader) -> Value | None:
    """Read a value; None: an array that is passed over."""
    kind = int(reader.number("<I"))
    if kind == _STRING:
        return reader.text()
    if kind in _SCALARS:
        return reader.number(_SCALARS[kind])
    if kind != _ARRAY:
        raise ValueError(f"type {kind} of a value")
    item = int(reader.number("<I"))
    length = reader.count("<Q", limit=_MOST_ELEMENTS, what="elements")
    if item == _STRING:
        for _ in range(length):
            reader.skip(reader.count("<Q", limit=_MOST_TEXT_BYTES, what="bytes of text"))
        return None
    if item not in _SCALARS:
        raise ValueError(f"an array of type {item}")
    if length > _MOST_KEPT:
        reader.skip(length * struct.calcsize(_SCALARS[item]))
        return None
    return tuple(reader.number(_SCALARS[item]) for _ in range(length))


def _tensor_info(reader: _Reader) -> tuple[str, tuple[int, ...], TensorType, int, int]:
    name = reader.text()
    if len(name) > _LONGEST_NAME:
        raise ValueError(f"tensor {name!r:.60} has a name of {len(name)} characters")
    shape = tuple(
        int(reader.number("<Q"))
        for _ in range(reader.count("<I", limit=4, what="dimensions of a tensor"))
    )
    number, offset = int(reader.number("<I")), int(reader.number("<Q"))
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        raise ValueError(f"tensor {name!r:.60} has type {number}, which is not known")
    elements = math.prod(shape)
    if not shape or min(shape) < 1 or elements >= 2**50 or shape[0] % kind.block:
        raise ValueError(f"tensor {name!r:.60} of type {kind.name} has shape {list(shape)}")
    return name, shape, kind, elements // kind.block * kind.block_bytes, offset
