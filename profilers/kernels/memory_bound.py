"""Operations limited by memory traffic, by kind; those of the reference step are timed themselves.

    kind           rows x width                       what runs
    rms_norm       rows x hidden                      steps.functional.rms_norm
    swiglu         rows x ffn                         steps.functional.swiglu of [rows, 2 ffn]
    rotary         tokens x (query + key elements)    steps.functional.rotary on heads of 64
    residual_add   rows x hidden                      x + y; its backward moves nothing
    permute        token copies x hidden              steps.functional.permute, two copies a token
    unpermute      token copies x hidden              steps.functional.unpermute, likewise
    router         tokens x experts                   softmax in fp32 and the two largest
    cross_entropy  tokens x vocabulary                mean loss of fp32 logits
    embedding      tokens x hidden                    lookups in a table of as many rows
    frozen_rms_norm  rows x hidden                    rms_norm without a gradient of its weights,
                                                      where a spec asks for it
    masked_fill    token copies x width               zeros in the rows of a mask, where a spec asks
                                                      for it

The gradient of a larger table costs writing the difference once more. Widths that heads of 64 do
not divide are rotated as one head; odd numbers of copies belong to one copy a token.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from profilers.devices import DTYPES
from profilers.kernels.autograd import UNLEARNT, Prepared, random, through_autograd
from profilers.records import Case
from profilers.steps.functional import (
    expert_order,
    permute,
    rms_norm,
    rotary,
    rotary_tables,
    swiglu,
    unpermute,
)

FROZEN_NORM = "frozen_rms_norm"
MASKED_FILL = "masked_fill"
ON_REQUEST: Final = frozenset({FROZEN_NORM, MASKED_FILL})
"""Kinds that only specs ask for."""
MIN_TABLE_ROWS = 256
EPSILON = 1e-5
THETA = 1e4
HEAD_SIZE = 64

Build = Callable[[int, int, torch.dtype, torch.device], Prepared]

CPU_ROWS = (128, 1024, 4096)
CUDA_ROWS = (1024, 8192, 65536)


def cases(device: torch.device, dtypes: Sequence[str]) -> tuple[Case, ...]:
    """Every kind over three row counts and two widths of its own."""
    on_cuda = device.type == "cuda"
    return tuple(
        Case(
            operation="memory_bound",
            kind=kind,
            dtype=dtype,
            direction="forward",
            axes={"rows": rows, "width": width},
        )
        for kind in BUILDERS
        if kind not in ON_REQUEST
        for dtype in dtypes_of(kind, dtypes)
        for rows in (CUDA_ROWS if on_cuda else CPU_ROWS)
        for width in widths_of(kind, on_cuda=on_cuda)
    )


def dtypes_of(kind: str, dtypes: Sequence[str]) -> tuple[str, ...]:
    """Types a kind is measured in: losses and routers stay in fp32."""
    fixed = {"cross_entropy": "fp32", "router": "fp32"}
    return (fixed[kind],) if kind in fixed else tuple(dtypes)


def widths_of(kind: str, *, on_cuda: bool) -> tuple[int, ...]:
    """Default widths of a kind."""
    if kind == "router":
        return (8, 64, 256) if on_cuda else (4, 16, 64)
    if kind == "cross_entropy":
        return (32000, 128256) if on_cuda else (256, 4096)
    return (1024, 4096, 16384) if on_cuda else (64, 256, 1024)


def prepare(case: Case, device: torch.device) -> Prepared:
    """Build the operands of one kind.

    Raises:
        ValueError: the kind does not exist.
    """
    if case.kind not in BUILDERS:
        raise ValueError(f"kind {case.kind!r} is not one of {', '.join(BUILDERS)}")
    build = BUILDERS[case.kind]
    return build(case.axes["rows"], case.axes["width"], DTYPES[case.dtype], device)


def _rms_norm(
    rows: int, width: int, dtype: torch.dtype, device: torch.device, *, is_frozen: bool = False
) -> Prepared:
    return through_autograd(
        lambda x, weight: rms_norm(x, weight, epsilon=EPSILON),
        operands=lambda: (
            random(rows, width, dtype=dtype, device=device),
            random(width, dtype=dtype, device=device, grad=not is_frozen),
        ),
        device=device,
    )


def _swiglu(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    return through_autograd(
        swiglu,
        operands=lambda: (random(rows, 2 * width, dtype=dtype, device=device),),
        device=device,
    )


def _rotary(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    size = HEAD_SIZE if width % HEAD_SIZE == 0 else width
    tables = rotary_tables(rows, head_dim=size, theta=THETA, dtype=dtype, device=device)
    return through_autograd(
        lambda x: rotary(x, *tables),
        operands=lambda: (random(1, rows, width // size, size, dtype=dtype, device=device),),
        device=device,
    )


def _residual_add(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    return through_autograd(
        torch.add,
        operands=lambda: (
            random(rows, width, dtype=dtype, device=device),
            random(rows, width, dtype=dtype, device=device),
        ),
        device=device,
    )


def _permute(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    top_k, order = _routed(rows, device)
    return through_autograd(
        lambda x: permute(x, order, top_k=top_k),
        operands=lambda: (random(rows // top_k, width, dtype=dtype, device=device),),
        device=device,
    )


def _unpermute(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    top_k, order = _routed(rows, device)
    return through_autograd(
        lambda y, weight: unpermute(y, order, weight),
        operands=lambda: (
            random(rows, width, dtype=dtype, device=device),
            random(rows // top_k, top_k, dtype=torch.float32, device=device),
        ),
        device=device,
    )


def _router(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    chosen = min(2, width)
    return through_autograd(
        lambda logits: logits.softmax(dim=-1, dtype=torch.float32).topk(chosen, dim=-1).values,
        operands=lambda: (random(rows, width, dtype=dtype, device=device),),
        device=device,
        num_values=UNLEARNT,
    )


def _cross_entropy(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    targets = torch.randint(width, (rows,), device=device)
    return through_autograd(
        lambda logits: functional.cross_entropy(logits, targets),
        operands=lambda: (random(rows, width, dtype=dtype, device=device),),
        device=device,
    )


def _embedding(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    table_rows = max(rows, MIN_TABLE_ROWS)
    tokens = torch.randint(table_rows, (rows,), device=device)
    return through_autograd(
        lambda table: functional.embedding(tokens, table),
        operands=lambda: (random(table_rows, width, dtype=dtype, device=device),),
        device=device,
    )


def _masked_fill(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    mask = torch.zeros(rows, 1, dtype=torch.bool, device=device)
    mask[-1] = True
    return through_autograd(
        lambda x: x.masked_fill(mask, 0.0),
        operands=lambda: (random(rows, width, dtype=dtype, device=device),),
        device=device,
    )


def _routed(copies: int, device: torch.device) -> tuple[int, Tensor]:
    """Choices per token, and a random order of the copies by eight experts."""
    top_k = 2 if copies % 2 == 0 else 1
    choices = torch.randint(8, (copies // top_k, top_k), device=device)
    return top_k, expert_order(choices)


BUILDERS: Final[Mapping[str, Build]] = {
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
    "rotary": _rotary,
    "residual_add": _residual_add,
    "permute": _permute,
    "unpermute": _unpermute,
    "router": _router,
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    FROZEN_NORM: partial(_rms_norm, is_frozen=True),
    MASKED_FILL: _masked_fill,
}
