"""The state of a rank in one block of host memory, laid out as a safetensors file.

Copying into it is all that training waits for when saves are asynchronous. The same bytes are
written to the memory of a node, and sent to another: 8 bytes with the length of the header
(little-endian), a JSON header padded with blanks, and the values without gaps.

Source: the format's description, https://github.com/huggingface/safetensors.
Not covered: byte orders other than little-endian.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from profilers.steps.checkpoints.pieces import Key, Piece

TYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
}
"""In the order in which values are laid out, wide ones first, so that all are aligned."""

LENGTH_BYTES: Final = 8
ALIGNMENT: Final = 64
FREE_BYTES: Final = 512
"""Of the header, for what differs between saves."""


class Snapshot:
    """Copies of pieces in one block of memory.

    Args:
        pieces: what is copied each time; their types, sizes and places stay.
        facts: what every file of it says about itself.
        is_pinned: lock the block, as fast copies from an accelerator need it.
    """

    def __init__(
        self, pieces: Sequence[Piece], *, facts: Mapping[str, str], is_pinned: bool
    ) -> None:
        order = list(TYPES)
        self._pieces = sorted(pieces, key=lambda piece: order.index(piece.values.dtype))
        self._table = _table(self._pieces)
        self._facts = dict(facts)
        space = len(json.dumps({"__metadata__": self._facts, **self._table})) + FREE_BYTES
        self._start = -(-(LENGTH_BYTES + space) // ALIGNMENT) * ALIGNMENT
        total = self._start + sum(piece.values.nbytes for piece in self._pieces)
        self.block = torch.zeros(total, dtype=torch.uint8, pin_memory=is_pinned)
        """The whole file."""
        self.copies = self._views()
        """By name and offsets: the copy of each piece."""

    def take(self) -> None:
        """Copy the pieces; returns when training may change them again."""
        for piece in self._pieces:
            self.copies[piece.key].copy_(piece.values, non_blocking=True)
        _synchronize(self._pieces)

    def put_back(self) -> None:
        """Copy what the block holds into the pieces."""
        for piece in self._pieces:
            piece.values.copy_(self.copies[piece.key], non_blocking=True)
        _synchronize(self._pieces)

    def seal(self, facts: Mapping[str, str]) -> None:
        """Write the header: the table, the facts and those of this save, and a checksum."""
        sealed = {**self._facts, **facts, "crc32": self._checksum()}
        header = json.dumps({"__metadata__": sealed, **self._table}).encode()
        length = self._start - LENGTH_BYTES
        if len(header) > length:
            raise ValueError(f"a header of {len(header)} bytes does not fit in {length}")
        self._bytes()[:LENGTH_BYTES] = np.frombuffer(length.to_bytes(LENGTH_BYTES, "little"), "u1")
        self._bytes()[LENGTH_BYTES : self._start] = np.frombuffer(header.ljust(length), "u1")

    def damage(self, facts: Mapping[str, str]) -> str | None:
        """Say what is wrong with the block as it was read; None when it may be put back."""
        header = read_header(bytes(self._bytes()[: self._start]))
        if header is None:
            return "its header is damaged"
        stored = header.pop("__metadata__")
        if header != self._table:
            return "it holds other tensors"
        if stored != {**facts, "crc32": self._checksum()}:
            return "it was saved for something else, or its checksum is wrong"
        return None

    def _checksum(self) -> str:
        return f"{zlib.crc32(self._bytes()[self._start :].data):08x}"

    def _bytes(self) -> NDArray[np.uint8]:
        values: NDArray[np.uint8] = self.block.numpy()
        return values

    def _views(self) -> dict[Key, Tensor]:
        views, start = {}, self._start
        for piece in self._pieces:
            part = self.block[start : start + piece.values.nbytes]
            views[piece.key] = part.view(piece.values.dtype).view(piece.values.size())
            start += piece.values.nbytes
        return views


def read_header(start: bytes) -> dict[str, Any] | None:
    """Parse the header at the start of a file; None where it is none."""
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    try:
        header = json.loads(start[LENGTH_BYTES : LENGTH_BYTES + length])
    except (ValueError, RecursionError):
        return None
    facts = header.get("__metadata__") if isinstance(header, dict) else None
    return header if isinstance(facts, dict) else None


def _table(pieces: Sequence[Piece]) -> dict[str, Any]:
    table, start = {}, 0
    for piece in pieces:
        end = start + piece.values.nbytes
        table[piece.name] = {
            "dtype": TYPES[piece.values.dtype],
            "shape": list(piece.values.size()),
            "data_offsets": [start, end],
        }
        start = end
    return table


def _synchronize(pieces: Sequence[Piece]) -> None:
    if any(piece.values.is_cuda for piece in pieces):
        torch.cuda.synchronize()
