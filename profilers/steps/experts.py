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

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from profilers.steps.functional import swiglu
from profilers.steps.loads import ROW_BLOCK, whole_blocks


def expert_ffn(x_sorted: Tensor, counts: Sequence[int], gate_up: Tensor, down: Tensor) -> Tensor:
    """Run every expert on its rows.

    Args:
        x_sorted: [M, H], rows grouped by expert in order.
        counts: rows of each of the E experts; they sum to M, zeros are fine.
        gate_up: [E, 2F, H], the gate's F rows first.
        down: [E, H, F].

    Returns:
        [M, H]. Kept for backward: x_sorted, the outputs of gate and up [M, 2F], and their SwiGLU
        [M, F].
    """
    hidden = swiglu(_grouped_linear(x_sorted, counts, gate_up))
    return _grouped_linear(hidden, counts, down)


def _grouped_linear(x_MI: Tensor, counts: Sequence[int], weight_EOI: Tensor) -> Tensor:
    if x_MI.is_cuda and x_MI.dtype is torch.bfloat16 and len(x_MI):
        stops = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
        offsets = stops.to(x_MI.device, non_blocking=True)
        return torch.nn.functional.grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=offsets)
    return _LoopedLinear.apply(x_MI, weight_EOI, tuple(counts))  # type: ignore[no-any-return, no-untyped-call]  # torch


class _LoopedLinear(torch.autograd.Function):
    """One GEMM per expert, each written into its rows of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        y = x.new_empty(len(x), weight.shape[1])
        _grouped_gemm(x, weight.transpose(1, 2), counts, out=y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = torch.empty_like(x)
        _grouped_gemm(grad, weight, ctx.counts, out=grad_x)
        return grad_x, _weight_gradients(grad, x, ctx.counts), None


def _grouped_gemm(x_MI: Tensor, weight_EIO: Tensor, counts: Sequence[int], *, out: Tensor) -> None:
    """Multiply every expert's rows; what a block writes too far, the next expert writes again.

    Where nothing follows, the rows beyond the last whole block are multiplied by themselves.
    """
    for expert, rows in enumerate(_row_slices(counts)):
        parts = [_block(x_MI, rows)]
        if parts[0].stop > len(x_MI):
            end = rows.stop - counts[expert] % ROW_BLOCK
            parts = [slice(rows.start, end), slice(end, rows.stop)]
        for part in parts:
            torch.mm(x_MI[part], weight_EIO[expert], out=out[part])


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
