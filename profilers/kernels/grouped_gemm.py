"""The SwiGLU expert network of one rank, exactly as the reference step runs it.

`tokens` rows over `experts`; the most-loaded expert holds `largest` of them and the others share
the rest evenly, the remainder going to the first of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from profilers.devices import DTYPES, last_cache_bytes
from profilers.kernels.autograd import Prepared, random, through_autograd
from profilers.records import Case
from profilers.steps.experts import expert_ffn

CPU_SHAPES = ((64, 64), (128, 256), (256, 512))
CPU_EXPERTS = (2, 8)
CPU_TOKENS = (128, 512, 2048)
CUDA_SHAPES = ((2048, 1024), (4096, 2048), (4096, 14336))
CUDA_EXPERTS = (2, 8, 32)
CUDA_TOKENS = (512, 4096, 32768)
SKEW = 2
"""Rows of the most-loaded expert over its even share, in an uneven case."""


def cases(device: torch.device, dtypes: Sequence[str]) -> tuple[Case, ...]:
    """Even and uneven loads of every shape; a shape is (hidden, ffn)."""
    on_cuda = device.type == "cuda"
    return tuple(
        Case(
            operation="grouped_gemm",
            dtype=dtype,
            direction="forward",
            axes={
                "experts": experts,
                "tokens": tokens,
                "largest": tokens // experts * skew,
                "hidden": hidden,
                "ffn": ffn,
            },
        )
        for dtype in dtypes
        for hidden, ffn in (CUDA_SHAPES if on_cuda else CPU_SHAPES)
        for experts in (CUDA_EXPERTS if on_cuda else CPU_EXPERTS)
        for tokens in (CUDA_TOKENS if on_cuda else CPU_TOKENS)
        for skew in (1, SKEW)
        if skew < experts
    )


def prepare(case: Case, device: torch.device) -> Prepared:
    """Build rows sorted by expert, and the experts' weights."""
    axes = case.axes
    dtype = DTYPES[case.dtype]
    experts, tokens, hidden, ffn = (axes[a] for a in ("experts", "tokens", "hidden", "ffn"))
    counts = row_counts(experts=experts, tokens=tokens, largest=axes["largest"])

    def operands() -> tuple[Tensor, ...]:
        return (
            random(tokens, hidden, dtype=dtype, device=device),
            random(experts, 2 * ffn, hidden, dtype=dtype, device=device),
            random(experts, hidden, ffn, dtype=dtype, device=device),
        )

    def experts_run(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return expert_ffn(x, counts, gate_up, down)

    return through_autograd(
        experts_run, operands=operands, device=device, cold_bytes=last_cache_bytes(device)
    )


def row_counts(*, experts: int, tokens: int, largest: int) -> tuple[int, ...]:
    """Give `largest` rows to the first expert and the rest evenly to the others.

    Raises:
        ValueError: no such loads exist.
    """
    if experts == 1:
        if largest != tokens:
            raise ValueError(f"one expert holds all {tokens} rows, not {largest}")
        return (tokens,)
    share, surplus = divmod(tokens - largest, experts - 1)
    if largest > tokens or share + bool(surplus) > largest:
        raise ValueError(
            f"{tokens} rows over {experts} experts cannot have {largest} rows in the most loaded"
        )
    return (largest, *(share + (expert < surplus) for expert in range(experts - 1)))
