"""The expert feed-forward network: SwiGLU over rows that lie sorted by expert.

On a GPU in bf16 the two products are PyTorch's grouped matrix product. Elsewhere they are a loop of
plain products into one output: on a CPU that is as fast as the grouped one, which besides fails
in the backward pass of an expert without tokens and knows no fp64.

Letters: E experts held by this rank, M rows (token copies), H hidden size, F expert width.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from profilers.steps.functional import swiglu


def expert_ffn(x_sorted: Tensor, counts: Sequence[int], gate_up: Tensor, down: Tensor) -> Tensor:
    """Run every expert on its rows.

    Args:
        x_sorted: [M, H], rows grouped by expert in order.
        counts: rows of each of the E experts; they sum to M, zeros are fine.
        gate_up: [E, 2F, H], the gate's F rows first.
        down: [E, H, F].

    Returns:
        [M, H]. Kept for backward: x_sorted, the gate and up products [M, 2F], and their SwiGLU
        [M, F].
    """
    hidden = swiglu(_grouped_linear(x_sorted, counts, gate_up))
    return _grouped_linear(hidden, counts, down)


def _grouped_linear(x_MI: Tensor, counts: Sequence[int], weight_EOI: Tensor) -> Tensor:
    if x_MI.is_cuda and x_MI.dtype is torch.bfloat16 and len(x_MI):
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32)
        offsets = ends.to(x_MI.device, non_blocking=True)
        return torch.nn.functional.grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=offsets)
    return _LoopedLinear.apply(x_MI, weight_EOI, tuple(counts))  # type: ignore[no-any-return, no-untyped-call]  # torch


class _LoopedLinear(torch.autograd.Function):
    """One product per expert, each written into its rows of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        y = x.new_empty(len(x), weight.shape[1])
        for expert, rows in enumerate(_row_slices(counts)):
            torch.mm(x[rows], weight[expert].t(), out=y[rows])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = torch.empty_like(x)
        grad_weight = torch.empty_like(weight)
        for expert, rows in enumerate(_row_slices(ctx.counts)):
            torch.mm(grad[rows], weight[expert], out=grad_x[rows])
            torch.mm(grad[rows].t(), x[rows], out=grad_weight[expert])
        return grad_x, grad_weight, None


def _row_slices(counts: Sequence[int]) -> Iterator[slice]:
    for end, count in zip(accumulate(counts), counts, strict=True):
        yield slice(end - count, end)
