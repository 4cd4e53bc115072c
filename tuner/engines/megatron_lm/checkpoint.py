"""Renumbers the experts of a safetensors checkpoint, a layer at a time, without loading it.

An expert's tensors are renamed and keep their bytes; a router's rows, and tensors with all experts,
are written row by row in the new order. Any dtype works, and memory is bounded by one row or
`PIECE_BYTES`. The new checkpoint is written atomically.

Group-limited routing (DeepSeek) chooses among groups of neighbouring experts: a permutation that
splits a group would change what the model computes, and is refused.

Format: https://github.com/huggingface/safetensors#format (8 bytes of length, a JSON header, data).
Not covered: Megatron's distributed checkpoints, which are not safetensors.
"""

import json
import shutil
import struct
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from profilers.files import open_regular
from tuner.engines.placement.expert_names import ExpertTensor, parse_name
from tuner.errors import OutputError, SpecError
from tuner.paths import AnyPath
from tuner.spec.files import one_line, read_json_object, read_small_text, shown_path

PIECE_BYTES: Final = 16_000_000
"""Bytes that are copied at a time."""

_LARGEST_HEADER_BYTES: Final = 100_000_000
"""Largest header of a file, bytes: the format's own limit."""

_LARGEST_TEXT_BYTES: Final = 64_000_000
"""Largest text of a permutation or an index."""

_INDEX: Final = ".safetensors.index.json"

_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})
"""Weights in other formats would keep the old numbers, so they are not copied."""

Permutation = Mapping[int, tuple[int, ...]]
"""Old experts that become experts 0, 1, ... in the new order, by decoder layer."""


def read_permutation(path: AnyPath) -> Permutation:
    """Read an emitted `expert_permutation.json`.

    Raises:
        SpecError: it is none, or a row is no permutation.
    """
    path = Path(path)
    source = shown_path(path)
    try:
        record = json.loads(
            read_small_text(path, what="permutation", most_bytes=_LARGEST_TEXT_BYTES)
        )
        rows = zip(record["layer_ids"], record["permutation"], strict=True)
        permutation = {int(layer): tuple(int(expert) for expert in row) for layer, row in rows}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SpecError(one_line(f"{source}: no permutation of experts: {error}")) from error
    for layer, row in permutation.items():
        _check_row(layer, row)
    return permutation


def permute_checkpoint(source: AnyPath, target: AnyPath, *, permutation: Permutation) -> None:
    """Write a copy of the checkpoint with its experts renumbered.

    Args:
        source: a folder with `.safetensors` files, their index and other files.
        target: a folder that does not exist.
        permutation: of the layers to be renumbered; others stay as they are.

    Raises:
        SpecError: the checkpoint cannot be renumbered; nothing is written.
        OutputError: the target exists or cannot be written.
    """
    source, target = Path(source), Path(target)
    for layer, row in permutation.items():
        _check_row(layer, row)
    shards = [_read_shard(path) for path in sorted(source.glob("*.safetensors"))]
    if not shards:
        raise SpecError(f"{shown_path(source)}: no .safetensors file in it")
    _check_groups(source, permutation)
    _check_complete(shards, permutation)
    indices = _indices(source, permutation)
    if target.exists():
        raise OutputError(f"{shown_path(target)} exists; name a folder that does not")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            for shard in shards:
                _write_shard(shard, unfinished / shard.path.name, permutation)
            for name, text in indices.items():
                (unfinished / name).write_text(text, encoding="utf-8")
            for path in _rest(source):
                shutil.copyfile(path, unfinished / path.name)
            unfinished.chmod(0o755)
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"cannot write {shown_path(target)}: {reason}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    first: int
    end: int
    """Bytes within the data."""
    part: ExpertTensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    path: Path
    header: dict[str, Any]
    tensors: tuple[_Tensor, ...]
    """Tensors of the shard, in the order of their bytes."""
    data_start: int


def _check_row(layer: int, row: tuple[int, ...]) -> None:
    if sorted(row) != list(range(len(row))):
        raise SpecError(
            f"layer {layer}: {len(row)} slots are no permutation of experts; a Megatron checkpoint"
            " holds every expert once, so plan with redundant_experts 0"
        )


def _read_shard(path: Path) -> _Shard:
    path = Path(path)
    source = shown_path(path)
    try:
        with open_regular(path) as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > _LARGEST_HEADER_BYTES:
                raise SpecError(f"{source}: a header of {size} bytes, so it is no safetensors file")
            header = json.loads(file.read(size))
        tensors = [_tensor(name, entry) for name, entry in header.items() if name != "__metadata__"]
    except (OSError, struct.error, ValueError, TypeError, KeyError, RecursionError) as error:
        raise SpecError(one_line(f"{source}: no safetensors file: {error}")) from error
    tensors.sort(key=lambda tensor: (tensor.first, tensor.end))
    place = 0
    for tensor in tensors:
        if tensor.first != place:
            raise SpecError(f"{source}: {tensor.name!r} starts at byte {tensor.first}, not {place}")
        place = tensor.end
    if 8 + size + place != path.stat().st_size:
        raise SpecError(
            f"{source}: {path.stat().st_size} bytes, its header says {8 + size + place}"
        )
    return _Shard(path=path, header=header, tensors=tuple(tensors), data_start=8 + size)


def _tensor(name: str, entry: Mapping[str, Any]) -> _Tensor:
    first, end = (int(offset) for offset in entry["data_offsets"])
    if not 0 <= first <= end:
        raise ValueError(f"{name!r} lies from byte {first} to {end}")
    shape = tuple(int(size) for size in entry["shape"])
    return _Tensor(name=name, shape=shape, first=first, end=end, part=parse_name(name))


def _check_complete(shards: Iterable[_Shard], permutation: Permutation) -> None:
    """Refuse a checkpoint that lacks a router or an expert of a layer to be renumbered."""
    routers: set[int] = set()
    seen: dict[int, set[int]] = {layer: set() for layer in permutation}
    for tensor in (tensor for shard in shards for tensor in shard.tensors):
        part = tensor.part
        if part is None or part.layer not in permutation:
            continue
        experts = len(permutation[part.layer])
        if part.kind == "expert" and part.expert is not None:
            seen[part.layer].add(part.expert)
            continue
        if not tensor.shape or tensor.shape[0] != experts:
            raise SpecError(
                f"{tensor.name!r} has shape {list(tensor.shape)}, the permutation {experts} experts"
            )
        if part.kind == "router":
            routers.add(part.layer)
        else:
            seen[part.layer] |= set(range(experts))
    for layer, row in permutation.items():
        if layer not in routers:
            raise SpecError(f"layer {layer}: the checkpoint has no router there")
        if seen[layer] != set(range(len(row))):
            raise SpecError(
                f"layer {layer}: the checkpoint has {len(seen[layer])} experts, the permutation"
                f" {len(row)}"
            )


def _check_groups(source: Path, permutation: Permutation) -> None:
    """Refuse permutations that split groups of group-limited routing."""
    path = source / "config.json"
    if not path.exists():
        return
    config = read_json_object(path, what="model config")
    config = config.get("text_config", config)
    groups, chosen = (config.get(name) or 1 for name in ("n_group", "topk_group"))
    if groups in (1, chosen):
        return
    if not isinstance(groups, int) or groups < 1:
        raise SpecError(f"{shown_path(path)}: n_group {groups!r} is no number of groups")
    for layer, row in permutation.items():
        size = max(len(row) // groups, 1)
        for first in range(0, len(row), size):
            if len({expert // size for expert in row[first : first + size]}) > 1:
                raise SpecError(
                    f"layer {layer}: the router chooses {chosen} of {groups} groups of {size}"
                    " experts, and the placement splits a group; place whole groups, or serve"
                    " with an engine that has an expert table"
                )


def _new_name(name: str, part: ExpertTensor | None, permutation: Permutation) -> str:
    if part is None or part.expert is None or part.layer not in permutation:
        return name
    return part.name_for(permutation[part.layer].index(part.expert))


def _indices(source: Path, permutation: Permutation) -> dict[str, str]:
    """Return the shard indices with renumbered tensor names."""
    texts = {}
    for path in sorted(source.glob(f"*{_INDEX}")):
        index = read_json_object(path, what="index", most_bytes=_LARGEST_TEXT_BYTES)
        shard_of = index.get("weight_map")
        if not isinstance(shard_of, dict):
            raise SpecError(f"{shown_path(path)}: no weight_map in it")
        index["weight_map"] = {
            _new_name(name, _part(name, path), permutation): shard
            for name, shard in shard_of.items()
        }
        texts[path.name] = json.dumps(index, indent=2) + "\n"
    return texts


def _part(name: str, path: Path) -> ExpertTensor | None:
    try:
        return parse_name(name)
    except ValueError as error:
        raise SpecError(f"{shown_path(path)}: {error}") from error


def _rest(source: Path) -> list[Path]:
    """Return the files to copy unchanged: configuration, tokenizer, notes."""
    return [
        path
        for path in sorted(source.iterdir())
        if path.is_file() and path.suffix not in _WEIGHTS and not path.name.endswith(_INDEX)
    ]


def _write_shard(shard: _Shard, target: Path, permutation: Permutation) -> None:
    name_for = {
        tensor.name: _new_name(tensor.name, tensor.part, permutation) for tensor in shard.tensors
    }
    header = {name_for.get(name, name): entry for name, entry in shard.header.items()}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # The format pads the header with spaces so that data starts at a multiple of 8.
    encoded += b" " * (-len(encoded) % 8)
    with open_regular(shard.path) as reader, target.open("wb") as writer:
        writer.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in shard.tensors:
            start, size = shard.data_start + tensor.first, tensor.end - tensor.first
            part = tensor.part
            if part is None or part.kind == "expert" or part.layer not in permutation:
                _copy(reader, writer, start=start, size=size)
                continue
            row = permutation[part.layer]
            expert_bytes = size // len(row)
            for expert in row:
                _copy(reader, writer, start=start + expert * expert_bytes, size=expert_bytes)


def _copy(reader: BinaryIO, writer: BinaryIO, *, start: int, size: int) -> None:
    reader.seek(start)
    while size:
        piece = reader.read(min(size, PIECE_BYTES))
        if not piece:
            raise OSError("the checkpoint ends while it is read")
        writer.write(piece)
        size -= len(piece)
