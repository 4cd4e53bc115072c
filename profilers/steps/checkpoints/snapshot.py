"""The state of a rank in one block of host memory, which a checkpoint is written from.

Copying into it is all that training waits for when saves are asynchronous.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
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


class Snapshot:
    """Copies of pieces in one block of memory.

    Args:
        pieces: what is copied each time; their types, sizes and places stay.
        is_pinned: lock the block, as fast copies from an accelerator need it.
    """

    def __init__(self, pieces: Sequence[Piece], *, is_pinned: bool) -> None:
        order = list(TYPES)
        self._pieces = sorted(pieces, key=lambda piece: order.index(piece.values.dtype))
        total = sum(piece.values.nbytes for piece in self._pieces)
        block = torch.empty(total, dtype=torch.uint8, pin_memory=is_pinned)
        self.copies: dict[Key, Tensor] = {}
        """By name and offsets: the copy of each piece."""
        start = 0
        for piece in self._pieces:
            part = block[start : start + piece.values.nbytes]
            self.copies[piece.key] = part.view(piece.values.dtype).view(piece.values.size())
            start += piece.values.nbytes

    def take(self) -> None:
        """Copy the pieces; returns when training may change them again."""
        for piece in self._pieces:
            self.copies[piece.key].copy_(piece.values, non_blocking=True)
        if any(piece.values.is_cuda for piece in self._pieces):
            torch.cuda.synchronize()
