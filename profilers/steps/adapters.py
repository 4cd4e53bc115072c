"""Low-rank adapters beside frozen matrices (LoRA): y = x W^T + s (x A^T) B^T.

B is zero at first, so that training starts from the frozen model (Hu et al., arXiv:2106.09685,
section 4.1). The product of an adapter is added where the frozen one was written, so it needs no
buffer of its own width.

Letters: M tokens, I inputs, O outputs, r rank, E stacked matrices.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from profilers.steps.config import StepConfig
from profilers.steps.weights import normal, trained_type


class LowRank(nn.Module):
    """The factors of an adapter, A[r, I] and B[O, r]; with `experts`, A[E, r, I] and B[E, O, r]."""

    def __init__(
        self,
        config: StepConfig,
        device: torch.device,
        *,
        name: str,
        inputs: int,
        outputs: int,
        experts: Sequence[int] = (),
    ) -> None:
        super().__init__()
        assert config.adapters is not None
        rank = config.adapters.rank
        names = [f"{name}.{expert}" for expert in experts] or [name]
        drawn = [
            normal(weight, (rank, inputs), seed=config.seed, device=device) for weight in names
        ]
        stack = (len(experts),) if experts else ()
        kept = trained_type(config)
        self.a = nn.Parameter(torch.stack(drawn).view(*stack, rank, inputs).to(kept))
        self.b = nn.Parameter(torch.zeros(*stack, outputs, rank, dtype=kept, device=device))


def adapters_of(
    config: StepConfig, device: torch.device, *, name: str, inputs: int, parts: Mapping[str, int]
) -> nn.ModuleDict:
    """Make the adapters of a matrix with these outputs one after the other, those that are asked.

    Args:
        config: says which.
        device: where they lie.
        name: of the module.
        inputs: I.
        parts: the names of targets, with their outputs.
    """
    chosen = () if config.adapters is None else config.adapters.targets
    return nn.ModuleDict(
        {
            part: LowRank(
                config, device, name=f"{name}.{part}.adapter", inputs=inputs, outputs=outputs
            )
            for part, outputs in parts.items()
            if part in chosen
        }
    )


def adapted_linear(
    x: Tensor, weight: Tensor, adapters: nn.ModuleDict, *, parts: Mapping[str, int], scale: float
) -> Tensor:
    """Multiply by a matrix and the adapters of its parts: [..., I] -> [..., O].

    Keeps x and s x A^T of each adapter; without adapters, what `torch.nn.functional.linear` does.
    """
    slices, factors, start = [], [], 0
    for part, outputs in parts.items():
        if part in adapters:
            slices.append((start, start + outputs))
            factors += [adapters[part].a, adapters[part].b]
        start += outputs
    if not slices:
        return nn.functional.linear(x, weight)
    return _AdaptedLinear.apply(x, weight, tuple(slices), scale, *factors)  # type: ignore[no-any-return, no-untyped-call]  # torch


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        slices: tuple[tuple[int, int], ...],
        scale: float,
        *factors: Tensor,
    ) -> Tensor:
        x_MI = x.flatten(0, -2)
        y_MO = x_MI @ weight.t()
        reduced = []
        for (start, stop), a, b in zip(slices, factors[::2], factors[1::2], strict=True):
            u_Mr = (x_MI @ a.t()).mul_(scale)
            y_MO[:, start:stop].addmm_(u_Mr, b.t())
            reduced.append(u_Mr)
        ctx.save_for_backward(x, weight, *factors, *reduced)
        ctx.slices, ctx.scale = slices, scale
        return y_MO.view(*x.shape[:-1], y_MO.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *rest = ctx.saved_tensors
        count = len(ctx.slices)
        factors, reduced = rest[: 2 * count], rest[2 * count :]
        x_MI, grad_MO = x.flatten(0, -2), grad.flatten(0, -2)
        grad_x = grad_MO @ weight if ctx.needs_input_grad[0] else None
        gradients: list[Tensor | None] = []
        for index, (start, stop) in enumerate(ctx.slices):
            a, b = factors[2 * index : 2 * index + 2]
            own_MO = grad_MO[:, start:stop]
            grad_u = (own_MO @ b).mul_(ctx.scale)
            gradients += [grad_u.t() @ x_MI, own_MO.t() @ reduced[index]]
            if grad_x is not None:
                grad_x.addmm_(grad_u, a)
        return None if grad_x is None else grad_x.view_as(x), None, None, None, *gradients
