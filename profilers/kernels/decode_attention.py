"""Attention of one new token for each of some sequences over their cached keys and values.

A serving engine keeps the cache in pages and reads it once a step; here every sequence's cache is
one run of memory, read from beyond the last-level cache, as the other layers' caches evict it.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from profilers.devices import DTYPES, last_cache_bytes
from profilers.kernels.attention import CPU_SHAPES, CUDA_SHAPES
from profilers.kernels.autograd import Prepared, in_turns, random
from profilers.records import Case

CPU_PASTS = ((1, 64), (4, 64), (16, 64), (1, 512), (4, 512), (16, 512), (1, 4096))
CUDA_PASTS = ((1, 1024), (16, 1024), (256, 1024), (1, 8192), (16, 8192), (64, 8192), (1, 65536))


def cases(device: torch.device, dtypes: Sequence[str]) -> tuple[Case, ...]:
    """The default grid; a shape is (heads, key-value heads, head size)."""
    on_cuda = device.type == "cuda"
    shapes = CUDA_SHAPES if on_cuda else CPU_SHAPES
    pasts = CUDA_PASTS if on_cuda else CPU_PASTS
    return tuple(
        Case(
            operation="decode_attention",
            dtype=dtype,
            axes={
                "batch": batch,
                "past": past,
                "heads": heads,
                "kv_heads": kv_heads,
                "head_dim": head_dim,
                "window": 0,
            },
        )
        for dtype, (heads, kv_heads, head_dim), (batch, past) in itertools.product(
            dtypes, shapes, pasts
        )
    )


def prepare(case: Case, device: torch.device) -> Prepared:
    """Build the queries of one token and the caches of keys and values."""
    axes, dtype = case.axes, DTYPES[case.dtype]
    seen = min(axes["past"], axes["window"] or axes["past"])

    def rows(heads: int, tokens: int) -> Tensor:
        shape = (axes["batch"], heads, tokens, axes["head_dim"])
        return random(*shape, dtype=dtype, device=device, grad=False)

    def operands() -> tuple[Tensor, ...]:
        kv_heads = axes["kv_heads"]
        return rows(axes["heads"], 1), rows(kv_heads, seen), rows(kv_heads, seen)

    turns = in_turns(operands, cold_bytes=last_cache_bytes(device), num_values=0)

    def decode() -> Tensor:
        query, key, value = next(turns)
        return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return Prepared(forward=decode, backward=None)
