"""Causal scaled-dot-product attention with grouped queries, on [batch, heads, sequence, size]."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from profilers.devices import DTYPES
from profilers.kernels.autograd import Prepared, random, through_autograd
from profilers.records import Case

CPU_SHAPES = ((4, 2, 32), (4, 4, 64))
CPU_SEQUENCES = ((1, 64), (4, 64), (1, 256), (4, 256), (1, 1024))
CUDA_SHAPES = ((32, 8, 128), (16, 16, 64), (16, 2, 128))
CUDA_SEQUENCES = ((1, 512), (1, 2048), (4, 2048), (1, 8192), (4, 8192), (1, 32768))


def cases(device: torch.device, dtypes: Sequence[str]) -> tuple[Case, ...]:
    """The default grid; a shape is (heads, key-value heads, head size)."""
    on_cuda = device.type == "cuda"
    shapes = CUDA_SHAPES if on_cuda else CPU_SHAPES
    sequences = CUDA_SEQUENCES if on_cuda else CPU_SEQUENCES
    return tuple(
        Case(
            operation="attention",
            dtype=dtype,
            direction="forward",
            axes={
                "batch": batch,
                "sequence": sequence,
                "heads": heads,
                "kv_heads": kv_heads,
                "head_dim": head_dim,
            },
        )
        for dtype, (heads, kv_heads, head_dim), (batch, sequence) in itertools.product(
            dtypes, shapes, sequences
        )
    )


def prepare(case: Case, device: torch.device) -> Prepared:
    """Build queries, keys and values."""
    axes = case.axes
    dtype = DTYPES[case.dtype]

    def heads(count: int) -> Tensor:
        shape = (axes["batch"], count, axes["sequence"], axes["head_dim"])
        return random(*shape, dtype=dtype, device=device)

    def operands() -> tuple[Tensor, ...]:
        return heads(axes["heads"]), heads(axes["kv_heads"]), heads(axes["kv_heads"])

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )

    return through_autograd(attention, operands=operands, device=device)
