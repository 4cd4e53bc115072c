"""Which rank writes what on shared storage: every piece once, the bytes spread over its holders.

All ranks know the pieces of all, because the split of the state never changes during a launch.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from profilers.steps.checkpoints.agreement import gather
from profilers.steps.checkpoints.pieces import Key, Piece
from profilers.steps.checkpoints.snapshot import TYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A piece of any rank, without its values."""

    name: str
    dtype: torch.dtype
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def key(self) -> Key:
        return self.name, self.offsets

    @property
    def num_bytes(self) -> int:
        return math.prod(self.lengths) * self.dtype.itemsize

    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.lengths))

    def properties(self) -> TensorProperties:
        return TensorProperties(dtype=self.dtype)


class StatePlan:
    """How the state of the run is split, and who writes which part; the same on every rank."""

    def __init__(self, pieces: Sequence[Piece], group: dist.ProcessGroup) -> None:
        tables = gather([_row(piece) for piece in pieces], group)
        types = {name: dtype for dtype, name in TYPES.items()}
        holders: dict[Key, list[int]] = {}
        self._entries: dict[Key, _Entry] = {}
        for rank, table in enumerate(tables):
            for name, dtype, size, offsets, lengths in table:
                entry = _Entry(
                    name=name,
                    dtype=types[dtype],
                    size=tuple(size),
                    offsets=tuple(offsets),
                    lengths=tuple(lengths),
                )
                self._entries[entry.key] = entry
                holders.setdefault(entry.key, []).append(rank)
        self._writer = _writers(self._entries, holders, ranks=len(tables))
        self._rank = group.rank()
        self.layout = hashlib.blake2b(json.dumps(tables).encode(), digest_size=8).hexdigest()
        """Digest of the split: equal ones have the same pieces on the same ranks."""

    def items(self) -> list[WriteItem]:
        """List what this rank writes."""
        return [
            WriteItem(
                index=MetadataIndex(entry.name, entry.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=entry.chunk(),
                    properties=entry.properties(),
                    size=torch.Size(entry.size),
                ),
            )
            for key, entry in self._entries.items()
            if self._writer[key] == self._rank
        ]

    def metadata(self) -> Metadata:
        """Describe all tensors, but not yet where they lie."""
        tensors: dict[str, TensorStorageMetadata] = {}
        for entry in self._entries.values():
            tensors.setdefault(
                entry.name,
                TensorStorageMetadata(entry.properties(), torch.Size(entry.size), chunks=[]),
            ).chunks.append(entry.chunk())
        return Metadata(state_dict_metadata=dict(tensors))


def _row(piece: Piece) -> list[object]:
    values = piece.values
    return [piece.name, TYPES[values.dtype], piece.size, piece.offsets, tuple(values.size())]


def _writers(
    entries: dict[Key, _Entry], holders: dict[Key, list[int]], *, ranks: int
) -> dict[Key, int]:
    """Give each piece, large ones first, to the holder that writes least so far."""
    written = [0] * ranks
    writer = {}
    for key in sorted(entries, key=lambda key: (-entries[key].num_bytes, key)):
        rank = min(holders[key], key=lambda rank: (written[rank], rank))
        writer[key] = rank
        written[rank] += entries[key].num_bytes
    return writer
