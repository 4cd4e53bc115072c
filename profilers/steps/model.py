"""The transformer, as the pieces that pipeline ranks hold.

embedding -> layers -> norm -> head, a layer being x + attention(norm(x)) then x + ffn(norm(x)).

Letters: B sequences of a micro-batch, S' tokens of a sequence on this tensor rank, H hidden,
V vocabulary, K experts per token.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from profilers.steps.attention import GroupedQueryAttention
from profilers.steps.config import LayerKind, Recompute, Stage, StepConfig
from profilers.steps.feed_forward import FeedForward
from profilers.steps.functional import rms_norm, wide
from profilers.steps.instruments import Instruments
from profilers.steps.layout import ParallelState
from profilers.steps.moe import MoeLayer
from profilers.steps.recompute import has_trained, recomputed
from profilers.steps.weights import normal, parameter


class Norm(nn.Module):
    """RMS norm over the last axis, replicated over tensor ranks."""

    def __init__(self, config: StepConfig, layout: ParallelState) -> None:
        super().__init__()
        self.weight = parameter(torch.ones(config.model.hidden_size), layout.device, config)
        self._epsilon = config.model.norm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, epsilon=self._epsilon)


class TransformerLayer(nn.Module):
    """[B, S', H] -> [B, S', H]."""

    def __init__(
        self,
        config: StepConfig,
        layout: ParallelState,
        instruments: Instruments,
        *,
        stage: Stage,
        layer: int,
    ) -> None:
        super().__init__()
        name = f"layers.{layer}"
        kinds = config.model.layers
        self.attention_norm = Norm(config, layout)
        self.attention = GroupedQueryAttention(config, layout, name=f"{name}.attention")
        self.ffn_norm = Norm(config, layout)
        self.moe_layer: int | None = None
        self.ffn: MoeLayer | FeedForward
        if kinds[layer] is LayerKind.MOE:
            self.moe_layer = kinds[:layer].count(LayerKind.MOE)
            self.ffn = MoeLayer(
                config,
                layout,
                instruments,
                stage=stage,
                moe_layer=self.moe_layer,
                name=f"{name}.moe",
            )
        else:
            width = config.model.dense_ffn_size
            self.ffn = FeedForward(config, layout, width=width, name=f"{name}.ffn")
        self._is_recomputed = stage.recompute is Recompute.FULL
        self._trains = has_trained(self)
        self._instruments = instruments

    def forward(self, x: Tensor, forced: Tensor | None) -> Tensor:
        """Run the layer; `forced` [B, S', K] are the experts of a forced MoE layer."""
        if self._is_recomputed:
            return recomputed(
                self._computed, x, forced, instruments=self._instruments, trains=self._trains
            )
        return self._computed(x, forced)

    def _computed(self, x: Tensor, forced: Tensor | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        normed = self.ffn_norm(x)
        if not isinstance(self.ffn, MoeLayer):
            return x + self.ffn(normed)  # type: ignore[no-any-return]  # modules return Any
        # The first call of a recomputed layer runs without gradients, the second one with.
        is_first_pass = not (self._is_recomputed and torch.is_grad_enabled())
        return x + self.ffn(normed, forced, is_first_pass=is_first_pass)  # type: ignore[no-any-return]


class StageModel(nn.Module):
    """One model chunk: tokens [B, S'] or activations [B, S', H] -> activations or logits.

    `begin_step` must be called before the micro-batches of a step, which then run in order.
    """

    def __init__(
        self, config: StepConfig, layout: ParallelState, instruments: Instruments, *, stage: int
    ) -> None:
        super().__init__()
        model, stages = config.model, config.stages
        first = sum(before.num_layers for before in stages[:stage])
        self.layers = nn.ModuleList(
            TransformerLayer(config, layout, instruments, stage=stages[stage], layer=layer)
            for layer in range(first, first + stages[stage].num_layers)
        )
        table = (model.vocab_size, model.hidden_size)
        is_last = stage == len(stages) - 1
        self.embedding = (
            parameter(
                normal("embedding", table, seed=config.seed, device=layout.device),
                layout.device,
                config,
            )
            if stage == 0
            else None
        )
        self.norm = Norm(config, layout) if is_last else None
        self.head = (
            parameter(
                normal("head", table, seed=config.seed, device=layout.device),
                layout.device,
                config,
            )
            if is_last and not model.tie_embeddings
            else None
        )
        self._microbatch = 0
        self._forced: Mapping[int, Sequence[Tensor]] = {}

    def begin_step(self, forced: Mapping[int, Sequence[Tensor]]) -> None:
        """Count micro-batches from 0 again; `forced` maps an MoE layer to its experts.

        One tensor [B, S', K] per micro-batch, each with a storage of its own, so that the meter
        counts only what a micro-batch keeps.
        """
        self._microbatch = 0
        self._forced = forced

    def forward(self, x: Tensor) -> Tensor:
        microbatch = self._microbatch
        self._microbatch += 1
        if self.embedding is not None:
            x = nn.functional.embedding(x, self.embedding)
        for layer in self.layers:
            assert isinstance(layer, TransformerLayer)
            forced = self._forced.get(-1 if layer.moe_layer is None else layer.moe_layer)
            x = layer(x, None if forced is None else forced[microbatch])
        if self.norm is None:
            return x
        head = self.embedding if self.head is None else self.head
        assert head is not None
        return nn.functional.linear(self.norm(x), head)


def token_loss(logits: Tensor, targets: Tensor, *, global_tokens: int) -> Tensor:
    """Sum the cross entropy of [B, S', V] against [B, S'], over the tokens of the whole step.

    A share of the global mean: summing it over ranks and micro-batches gives the loss.
    """
    wide_logits = wide(logits.flatten(0, 1))
    total = nn.functional.cross_entropy(wide_logits, targets.flatten(), reduction="sum")
    return total / global_tokens
