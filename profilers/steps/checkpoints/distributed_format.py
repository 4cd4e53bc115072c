"""Read PyTorch's distributed checkpoints without running what a foreign file asks for.

`.metadata` is a pickle: only the classes that PyTorch's writer puts there are looked up, none of
which does more than hold values, and all places and sizes are checked. Tensors are loaded by
PyTorch's reader, with `weights_only`; entries of any other kind are never loaded, because its
planner would unpickle them.
"""

import math
import pathlib
import pickle
import re
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from profilers.errors import CheckpointDamagedError
from profilers.steps.checkpoints.manifest import FileFacts
from profilers.steps.checkpoints.pieces import Piece

METADATA: Final = ".metadata"
DATA_FILE: Final = re.compile(r"__\d+_\d+\.distcp")

BROKEN: Final = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
)
"""What reading a damaged pickle, or tensors from other places than it says, raises."""


def _member(kind: Any, name: str) -> Any:
    """Look up a memory format as `getattr`, by which Python 3.11.0 to 3.11.3 write enumerations."""
    if kind is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("it asks for builtins.getattr")
    return metadata._MEM_FORMAT_ENCODING[name]


def _allowed() -> dict[tuple[str, str], Any]:
    classes: list[type] = [
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
    ]
    allowed: dict[tuple[str, str], Any] = {(one.__module__, one.__name__): one for one in classes}
    allowed["torch", "Size"] = torch.Size
    allowed["builtins", "getattr"] = _member
    allowed["torch.serialization", "_get_layout"] = torch.serialization._get_layout
    # The writer stores where it wrote, as a path of its Python release.
    for module in ("pathlib", "pathlib._local"):
        allowed[module, "PosixPath"] = pathlib.PurePosixPath
    types = (one for one in vars(torch).values() if isinstance(one, torch.dtype))
    allowed |= {("torch", str(one).removeprefix("torch.")): one for one in types}
    return allowed


class _MetadataUnpickler(pickle.Unpickler):
    """Looks up the classes of metadata and nothing else."""

    _allowed = _allowed()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


def read_metadata(folder: Path, *, files: Mapping[str, FileFacts]) -> Metadata:
    """Read and check `.metadata`.

    Args:
        folder: of the checkpoint.
        files: that its tensors may lie in.

    Raises:
        CheckpointDamagedError: it is none, or says what cannot be.
        OSError: it cannot be read.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            stored = _MetadataUnpickler(file).load()
    except pickle.UnpicklingError as error:
        raise CheckpointDamagedError(f"{path} is refused: {error}") from error
    except (*BROKEN, MemoryError) as error:
        raise CheckpointDamagedError(f"{path} is damaged") from error
    try:
        is_sound = isinstance(stored, Metadata) and _is_sound(stored, files)
    except BROKEN:
        is_sound = False
    if not is_sound:
        raise CheckpointDamagedError(f"{path} describes tensors that its files cannot hold")
    return stored  # type: ignore[no-any-return]  # checked above


def load_pieces(folder: Path, pieces: Sequence[Piece], *, files: Mapping[str, FileFacts]) -> None:
    """Fill pieces from a checkpoint of any layout.

    Args:
        folder: of the checkpoint.
        pieces: what to fill.
        files: that its tensors may lie in.

    Raises:
        CheckpointDamagedError: a tensor is missing, or of another size or type.
        OSError: a file cannot be read.
    """
    stored = read_metadata(folder, files=files)
    reads = [read for piece in pieces for read in _reads(piece, stored, folder / METADATA)]
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(stored, is_coordinator=False)
    try:
        reader.read_data(LoadPlan(reads), _PiecePlanner(pieces)).wait()
    except BROKEN as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointDamagedError(f"{folder} cannot be loaded: {reason}") from error


def _is_sound(stored: Metadata, files: Mapping[str, FileFacts]) -> bool:
    tensors = stored.state_dict_metadata.values()
    return all(
        _is_inside(tensor) for tensor in tensors if isinstance(tensor, TensorStorageMetadata)
    ) and all(
        isinstance(index, MetadataIndex) and _lies_in(place, files)
        for index, place in stored.storage_data.items()
    )


def _is_inside(tensor: TensorStorageMetadata) -> bool:
    """Whether all chunks of a tensor are inside it."""
    return all(
        len(chunk.offsets) == len(chunk.sizes) == len(tensor.size)
        and all(
            min(offset, length) >= 0 and offset + length <= size
            for offset, length, size in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
        )
        for chunk in tensor.chunks
    )


def _lies_in(place: Any, files: Mapping[str, FileFacts]) -> bool:
    """Whether a file of this folder has the bytes that an entry claims."""
    return (
        isinstance(place, filesystem._StorageInfo)
        and DATA_FILE.fullmatch(place.relative_path) is not None
        and place.relative_path in files
        and min(place.offset, place.length) >= 0
        and place.offset + place.length <= files[place.relative_path].bytes
        and not place.transform_descriptors
    )


def _reads(piece: Piece, stored: Metadata, path: Path) -> list[ReadItem]:
    """List which parts of the stored chunks fill a piece."""
    tensor = stored.state_dict_metadata.get(piece.name)
    if not isinstance(tensor, TensorStorageMetadata):
        raise CheckpointDamagedError(f"{path} has no tensor {piece.name}")
    if tuple(tensor.size) != piece.size or tensor.properties.dtype != piece.values.dtype:
        raise CheckpointDamagedError(
            f"{path}: {piece.name} is {tensor.properties.dtype} {list(tensor.size)} there,"
            f" {piece.values.dtype} {list(piece.size)} here"
        )
    box = ChunkStorageMetadata(torch.Size(piece.offsets), piece.values.size())
    reads = create_read_items_for_chunk_list(piece.name, tensor, [box])
    covered = sum(math.prod(read.lengths) for read in reads)
    if covered != piece.values.numel() or any(
        read.storage_index not in stored.storage_data for read in reads
    ):
        raise CheckpointDamagedError(f"{path}: parts of {piece.name} are missing")
    return reads


class _PiecePlanner(DefaultLoadPlanner):
    """Lets PyTorch's reader write into pieces."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self._values = {piece.key: piece.values for piece in pieces}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._values[index.fqn, tuple(index.offset or ())]

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise CheckpointDamagedError(f"{read_item.dest_index.fqn} is no tensor")
