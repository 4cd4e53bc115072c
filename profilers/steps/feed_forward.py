"""The dense SwiGLU feed-forward network, also used as shared expert, split over tensor ranks.

Letters: B sequences, S tokens, T tensor ranks, H hidden, F width of the whole network.
"""

import torch
from torch import Tensor, nn

from profilers.steps.adapters import adapted_linear, adapters_of
from profilers.steps.collectives import gather_sequence, scatter_sequence
from profilers.steps.config import StepConfig
from profilers.steps.functional import swiglu
from profilers.steps.layout import ParallelState
from profilers.steps.weights import normal, parameter, shard


class FeedForward(nn.Module):
    """[B, S / T, H] -> [B, S / T, H]; the residual is the caller's."""

    def __init__(self, config: StepConfig, layout: ParallelState, *, width: int, name: str) -> None:
        super().__init__()
        hidden, ranks, rank = config.model.hidden_size, layout.degrees.tensor, layout.tensor_rank
        self._group = layout.tensor_group
        halves = [
            shard(
                normal(f"{name}.{half}", (width, hidden), seed=config.seed, device=layout.device),
                axis=0,
                rank=rank,
                ranks=ranks,
            )
            for half in ("gate", "up")
        ]
        self.gate_up = parameter(torch.cat(halves), layout.device, config)
        gain = (2 * len(config.model.layers)) ** -0.5
        full = normal(
            f"{name}.down", (hidden, width), seed=config.seed, device=layout.device, gain=gain
        )
        self.down = parameter(shard(full, axis=1, rank=rank, ranks=ranks), layout.device, config)
        self._scale = config.adapters.scale if config.adapters else 1.0
        self._inputs = {"gate_proj": width // ranks, "up_proj": width // ranks}
        self._outputs = {"down_proj": hidden}
        self.gate_up_adapters = adapters_of(
            config, layout.device, name=name, inputs=hidden, parts=self._inputs
        )
        self.down_adapters = adapters_of(
            config, layout.device, name=name, inputs=width // ranks, parts=self._outputs
        )

    def forward(self, x: Tensor) -> Tensor:
        x = gather_sequence(x, self._group)
        gate_up = adapted_linear(
            x, self.gate_up, self.gate_up_adapters, parts=self._inputs, scale=self._scale
        )
        y = adapted_linear(
            swiglu(gate_up), self.down, self.down_adapters, parts=self._outputs, scale=self._scale
        )
        return scatter_sequence(y, self._group)
