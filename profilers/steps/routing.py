"""The router: which experts a token goes to, and with what weight.

Softmax in fp32 at least, K experts per token, weights renormalised over them. `learned` takes the K
most probable; `forced` takes given experts, weighted by their probabilities, so the router still
learns.
Balancing is a sequence-wise auxiliary loss (DeepSeek-V3, arXiv 2412.19437, section 2.1.2, with
softmax probabilities) or its bias that is added for the choice only and moved once a step.

Letters: B sequences, S' tokens of a sequence on this rank, T = B * S', E experts, K per token,
H hidden size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from profilers.steps.config import StepConfig
from profilers.steps.functional import wide
from profilers.steps.instruments import Instruments
from profilers.steps.layout import ParallelState
from profilers.steps.weights import normal, parameter


class TopKRouter(nn.Module):
    """x[B, S', H] -> experts[T, K], weights[T, K], fp32 at least; replicated over tensor ranks."""

    bias: Tensor

    def __init__(
        self,
        config: StepConfig,
        layout: ParallelState,
        instruments: Instruments,
        *,
        moe_layer: int,
        name: str,
    ) -> None:
        super().__init__()
        shape = (config.model.num_experts, config.model.hidden_size)
        self.weight = parameter(
            normal(name, shape, seed=config.seed, device=layout.device), layout.device, config
        )
        self.register_buffer("bias", torch.zeros(shape[0], device=layout.device), persistent=False)
        self._config = config
        self._group = layout.tensor_group
        self._instruments = instruments
        self.moe_layer = moe_layer

    def forward(
        self, x: Tensor, forced: Tensor | None, *, is_first_pass: bool
    ) -> tuple[Tensor, Tensor]:
        probability = wide(nn.functional.linear(x, self.weight)).softmax(dim=-1)
        experts = self._chosen(probability.detach()) if forced is None else forced
        copies_BE = _copies(experts, self._config.model.num_experts)
        if is_first_pass:
            self._instruments.note_load(self.moe_layer, copies_BE.sum(dim=0))
        if self._config.routing.balancing == "aux_loss":
            probability = self._balanced(probability, copies_BE)
        weight = probability.gather(-1, experts)
        weight = weight / weight.sum(dim=-1, keepdim=True)
        return experts.flatten(0, 1), weight.flatten(0, 1)

    @torch.no_grad()
    def move_bias(self, load_E: Tensor) -> None:
        """Raise the bias of experts below the mean load of the global batch, lower the others'."""
        load = load_E.float()
        self.bias += self._config.routing.coefficient * (load.mean() - load).sign()

    def _chosen(self, probability: Tensor) -> Tensor:
        return (probability + self.bias).topk(self._config.model.top_k, dim=-1).indices

    def _balanced(self, probability: Tensor, copies_BE: Tensor) -> Tensor:
        """Inject d loss / d probability = coefficient * f_e / (S * global batch).

        Loss of a sequence: coefficient * sum over e of f_e * mean over its tokens of p_e, with
        f_e = E / (K * S) * copies_e; averaged over the sequences of the global batch.
        """
        config = self._config
        if self._group.size() > 1:
            dist.all_reduce(copies_BE, group=self._group)
        scale = config.routing.coefficient * config.model.num_experts
        scale /= config.model.top_k * config.sequence_length**2 * config.global_batch_size
        return _AddGradient.apply(probability, copies_BE.to(probability.dtype) * scale)  # type: ignore[no-any-return, no-untyped-call]  # torch


def _copies(experts_BSK: Tensor, num_experts: int) -> Tensor:
    chosen = experts_BSK.flatten(1)
    counts = chosen.new_zeros(len(chosen), num_experts)
    return counts.scatter_add_(1, chosen, torch.ones_like(chosen))


class _AddGradient(torch.autograd.Function):
    """The identity, whose backward adds a constant: a loss that no stage has to pass on."""

    @staticmethod
    def forward(ctx: Any, probability_BSE: Tensor, gradient_BE: Tensor) -> Tensor:
        ctx.save_for_backward(gradient_BE)
        return probability_BSE.view_as(probability_BSE)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gradient_BE,) = ctx.saved_tensors
        return grad + gradient_BE.unsqueeze(1), None
