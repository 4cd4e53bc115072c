"""The expert feed-forward network: SwiGLU over rows that lie sorted by expert.

On a GPU in bf16 the two GEMMs are PyTorch's grouped GEMM. Elsewhere they are a loop of plain GEMMs
into one output: on a CPU that is as fast as the grouped one, which also
fails in the backward pass of an expert without tokens and has no fp64.

oneDNN, which computes bf16 on processors, generates a kernel for every shape, and no two
micro-batches bring an expert as many rows. So rows are multiplied by whole blocks there, as engines
pad them for fp8: kernels are reused, and a step whose rows vary took 2.2 s instead of 2.7 (two
ranks, 8 experts of 256 by 512, 256 rows each).

Letters: E experts on this rank, M rows (token copies), H hidden size, F expert width.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from profilers.steps.functional import swiglu
from profilers.steps.loads import ROW_BLOCK, whole_blocks

RANK_BLOCK: Final = 8
"""The grouped GEMM takes rows of whole 16 bytes, so adapters of other ranks are padded by zeros: a
loop over 64 experts made a step three times as long on an H200."""


class ExpertAdapters(NamedTuple):
    """Low-rank adapters of the experts' matrices, A[E, r, I] and B[E, O, r] each."""

    gate_up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]
    scale: float


def expert_ffn(
    x_sorted: Tensor,
    counts: Sequence[int],
    gate_up: Tensor,
    down: Tensor,
    adapters: ExpertAdapters | None = None,
    activation: Callable[[Tensor], Tensor] = swiglu,
) -> Tensor:
    """Run every expert on its rows.

    Args:
        x_sorted: [M, H], rows grouped by expert in order.
        counts: rows of each of the E experts; they sum to M, zeros are fine.
        gate_up: [E, 2F, H], the gate's F rows first; [E, F, H] without a gate.
        down: [E, H, F].
        adapters: of both; None: none.
        activation: of what gate and up give, to [M, F].

    Returns:
        [M, H]. Kept for backward: x_sorted, the outputs of gate and up [M, 2F], and their SwiGLU
        [M, F]; of frozen weights without adapters [M, 2F] alone, with adapters [M, r] twice, too,
        r in whole `RANK_BLOCK` where the GEMM is grouped.
    """
    if adapters is None:
        return _grouped_linear(activation(_grouped_linear(x_sorted, counts, gate_up)), counts, down)
    hidden = activation(_adapted(x_sorted, counts, gate_up, adapters.gate_up, scale=adapters.scale))
    return _adapted(hidden, counts, down, adapters.down, scale=adapters.scale)


def _adapted(
    x_MI: Tensor,
    counts: Sequence[int],
    weight_EOI: Tensor,
    factors: tuple[Tensor, Tensor],
    *,
    scale: float,
) -> Tensor:
    a_ErI, b_EOr = factors
    if _has_grouped_kernel(x_MI):
        missing = -a_ErI.shape[1] % RANK_BLOCK
        a_ErI = torch.nn.functional.pad(a_ErI, (0, 0, 0, missing))
        b_EOr = torch.nn.functional.pad(b_EOr, (0, missing))
        u_Mr = _grouped_linear(x_MI, counts, a_ErI) * scale
        return _grouped_linear(x_MI, counts, weight_EOI) + _grouped_linear(u_Mr, counts, b_EOr)
    return _LoopedAdapted.apply(x_MI, weight_EOI, a_ErI, b_EOr, scale, tuple(counts))  # type: ignore[no-any-return, no-untyped-call]  # torch


def _grouped_linear(x_MI: Tensor, counts: Sequence[int], weight_EOI: Tensor) -> Tensor:
    if _has_grouped_kernel(x_MI):
        stops = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
        offsets = stops.to(x_MI.device, non_blocking=True)
        return torch.nn.functional.grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=offsets)
    return _LoopedLinear.apply(x_MI, weight_EOI, tuple(counts))  # type: ignore[no-any-return, no-untyped-call]  # torch


def _has_grouped_kernel(x_MI: Tensor) -> bool:
    return x_MI.is_cuda and x_MI.dtype is torch.bfloat16 and len(x_MI) > 0


class _LoopedLinear(torch.autograd.Function):
    """One GEMM per expert, each written into its rows of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.counts = counts
        y = x.new_empty(len(x), weight.shape[1])
        _grouped_gemm(x, weight.transpose(1, 2), counts, out=y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.new_empty(len(grad), weight.shape[2])
            _grouped_gemm(grad, weight, ctx.counts, out=grad_x)
        return grad_x, None if x is None else _weight_gradients(grad, x, ctx.counts), None


class _LoopedAdapted(torch.autograd.Function):
    """The frozen GEMM of each expert, and its adapter's product added to the same rows.

    Expert by expert, because what a block writes too far the next expert must write again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        a: Tensor,
        b: Tensor,
        scale: float,
        counts: tuple[int, ...],
    ) -> Tensor:
        y = x.new_empty(len(x), weight.shape[1])
        u = x.new_empty(len(x), a.shape[1])
        for expert, part in _parts(x, counts):
            torch.mm(x[part], weight[expert].t(), out=y[part])
            torch.mm(x[part], a[expert].t(), out=u[part]).mul_(scale)
            y[part].addmm_(u[part], b[expert].t())
        ctx.save_for_backward(x, weight, a, b, u)
        ctx.scale, ctx.counts = scale, counts
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, u = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        grad_u = torch.empty_like(u)
        for expert, part in _parts(grad, ctx.counts):
            torch.mm(grad[part], b[expert], out=grad_u[part]).mul_(ctx.scale)
            if grad_x is not None:
                torch.mm(grad[part], weight[expert], out=grad_x[part])
                grad_x[part].addmm_(grad_u[part], a[expert])
        grad_a = _weight_gradients(grad_u, x, ctx.counts)
        return grad_x, None, grad_a, _weight_gradients(grad, u, ctx.counts), None, None


def _grouped_gemm(x_MI: Tensor, weight_EIO: Tensor, counts: Sequence[int], *, out: Tensor) -> None:
    """Multiply every expert's rows; what a block writes too far, the next expert writes again."""
    for expert, part in _parts(x_MI, counts):
        torch.mm(x_MI[part], weight_EIO[expert], out=out[part])


def _parts(x_MI: Tensor, counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield each expert's rows as whole blocks.

    Where nothing follows, the rows beyond the last whole block are a part of their own.
    """
    for expert, rows in enumerate(_row_slices(counts)):
        block = _block(x_MI, rows)
        if block.stop <= len(x_MI):
            yield expert, block
            continue
        end = rows.stop - counts[expert] % ROW_BLOCK
        yield expert, slice(rows.start, end)
        yield expert, slice(end, rows.stop)


def _weight_gradients(grad_MO: Tensor, x_MI: Tensor, counts: Sequence[int]) -> Tensor:
    """Sum grad[m, o] * x[m, i] over every expert's rows: [E, O, I].

    The narrower operand is copied beside zeros, by which the rest of the other's block counts
    nothing, as long as it is finite; where the block ends beyond all rows both are copied.
    """
    gradient = grad_MO.new_empty(len(counts), grad_MO.shape[1], x_MI.shape[1])
    x_is_wide = x_MI.shape[1] > grad_MO.shape[1]
    for expert, rows in enumerate(_row_slices(counts)):
        block = _block(x_MI, rows)
        goes_on = block.stop <= len(x_MI)
        grad = grad_MO[block] if goes_on and not x_is_wide else _padded_block(grad_MO, rows)
        x = x_MI[block] if goes_on and x_is_wide else _padded_block(x_MI, rows)
        torch.mm(grad.t(), x, out=gradient[expert])
    return gradient


def _row_slices(counts: Sequence[int]) -> Iterator[slice]:
    for end, count in zip(accumulate(counts), counts, strict=True):
        yield slice(end - count, end)


def _block(x_MI: Tensor, rows: slice) -> slice:
    """Extend rows to whole blocks where every shape needs a kernel of its own."""
    is_generated = x_MI.dtype is torch.bfloat16 and x_MI.device.type == "cpu"
    count = rows.stop - rows.start
    return slice(rows.start, rows.start + (whole_blocks(count) if is_generated else count))


def _padded_block(x_MI: Tensor, rows: slice) -> Tensor:
    """Give rows as a whole block, zeros behind them; no copy where they fill it."""
    block = _block(x_MI, rows)
    if block == rows:
        return x_MI[rows]
    count = rows.stop - rows.start
    whole = x_MI.new_empty(block.stop - block.start, x_MI.shape[1])
    whole[:count] = x_MI[rows]
    whole[count:] = 0.0
    return whole
