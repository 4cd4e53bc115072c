"""The memory-bound operations of the reference step, as plain functions to time in isolation.

What each keeps for the backward pass is part of its contract, because the memory model counts it.

Letters: B sequences, S tokens of a sequence, H hidden size, N heads, D head size, T tokens,
K experts per token, M = T * K token copies, F width of a feed-forward network.

Not covered: fused device kernels; these are the operations as PyTorch runs them eagerly.
"""

from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, *, epsilon: float) -> Tensor:
    """Scale the last axis of x[..., H] to unit root mean square, times weight[H].

    Keeps x and one fp32 scale per row; nothing where neither needs a gradient.
    """
    return _RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-any-return, no-untyped-call]  # torch


def rotary_tables(
    sequence_length: int, *, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Build cosine and sine of every position's angles, each [S, 1, D] in `dtype`."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    position = torch.arange(sequence_length, dtype=torch.float64, device=device)
    angle = torch.outer(position, theta**-exponent)
    both_halves = torch.cat((angle, angle), dim=-1).unsqueeze(1)
    return both_halves.cos().to(dtype), both_halves.sin().to(dtype)


def rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate x[B, S, N, D] by its positions' angles, tables [S, 1, D].

    Keeps the two tables, which are no activations.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def swiglu(gate_up: Tensor) -> Tensor:
    """Multiply silu(gate) by up: [..., 2F] -> [..., F], the gate in the first half.

    Keeps its input only.
    """
    return _SwiGlu.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]  # torch's stub


def expert_order(experts_TK: Tensor) -> Tensor:
    """Order the M = T * K copies by expert, ties by token: the copy (token * K + choice) [M]."""
    return experts_TK.flatten().argsort(stable=True)


def inverse_order(order_M: Tensor) -> Tensor:
    """Invert a permutation: where each element of the old order lies in the new one [M]."""
    place = torch.empty_like(order_M)
    place[order_M] = torch.arange(len(order_M), device=order_M.device)
    return place


def reorder(x_MH: Tensor, order_M: Tensor, place_M: Tensor) -> Tensor:
    """Lay rows out by a permutation, `place` being the inverse of `order`.

    Keeps the M indices of the inverse, 8 bytes each: the backward gathers by it, which is faster
    than to scatter.
    """
    return _Reorder.apply(x_MH, order_M, place_M)  # type: ignore[no-any-return, no-untyped-call]  # torch


def permute(x_TH: Tensor, order_M: Tensor, *, top_k: int) -> Tensor:
    """Lay the token copies out in `order`: [T, H] -> [M, H].

    Keeps M indices of 8 bytes.
    """
    return _Permute.apply(x_TH, order_M, top_k)  # type: ignore[no-any-return, no-untyped-call]  # torch


def unpermute(y_MH: Tensor, order_M: Tensor, weight_TK: Tensor) -> Tensor:
    """Undo `permute` and sum each token's copies by weight: [M, H], [T, K] -> [T, H].

    Keeps the copies in token order [M, H], the weights in the copies' dtype, and M indices
    of 8 bytes.
    """
    num_tokens, top_k = weight_TK.shape
    y_TKH = reorder(y_MH, inverse_order(order_M), order_M).view(num_tokens, top_k, y_MH.shape[1])
    return (y_TKH * weight_TK.to(y_MH.dtype).unsqueeze(-1)).sum(dim=1)


def sum_rows(rows_MH: Tensor, place_M: Tensor, *, num_rows: int) -> Tensor:
    """Add every row to the one at its place: [M, H] -> [num_rows, H].

    Keeps M indices of 8 bytes; `Tensor.index_add` would keep the rows too.
    """
    return _SumRows.apply(rows_MH, place_M, num_rows)  # type: ignore[no-any-return, no-untyped-call]  # torch


def wide(x: Tensor) -> Tensor:
    """Convert to fp32 what is narrower."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _RmsNorm(torch.autograd.Function):
    """Written out so that the backward keeps x and the scale, not every intermediate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide_x = wide(x)
        scale = torch.rsqrt(wide_x.square().mean(dim=-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale)
        return (wide_x * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed = wide(x) * scale
        wide_grad = wide(grad)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (wide_grad * normed).flatten(0, -2).sum(dim=0).to(weight.dtype)
        inner = wide_grad * weight
        grad_x = scale * (inner - normed * (inner * normed).mean(dim=-1, keepdim=True))
        return grad_x.to(x.dtype), grad_weight, None


class _SwiGlu(torch.autograd.Function):
    """Written out so that the backward keeps the input and computes silu again."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad, torch.nn.functional.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return grad_gate_up


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place), None, None


class _Permute(torch.autograd.Function):
    """The gradient of a token is the sum over its copies, gathered in token order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return x.index_select(0, order.div(top_k, rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        copies = grad.index_select(0, inverse_order(order))
        tokens = len(copies) // ctx.top_k
        return copies.view(tokens, ctx.top_k, grad.shape[-1]).sum(dim=1), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor, num_rows: int) -> Tensor:
        ctx.save_for_backward(place)
        return rows.new_zeros(num_rows, rows.shape[1]).index_add_(0, place, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place), None, None
