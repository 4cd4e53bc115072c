"""Grouped-query attention with rotary positions, its heads split over tensor ranks.

Letters: B sequences, S tokens, T tensor ranks, H hidden, A query heads, G key-value heads of this
rank, D head size.
"""

import torch
from torch import Tensor, nn

from profilers.steps.adapters import adapted_linear, adapters_of
from profilers.steps.collectives import gather_sequence, scatter_sequence
from profilers.steps.config import StepConfig
from profilers.steps.functional import rotary, rotary_tables
from profilers.steps.layout import ParallelState
from profilers.steps.weights import compute_type, normal, parameter, shard


class GroupedQueryAttention(nn.Module):
    """[B, S / T, H] -> [B, S / T, H]; the residual is the caller's."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: StepConfig, layout: ParallelState, *, name: str) -> None:
        super().__init__()
        model, ranks = config.model, layout.degrees.tensor
        self._heads = model.num_heads // ranks
        self._kv_heads = model.num_kv_heads // ranks
        self._head_dim = model.head_dim
        self._group = layout.tensor_group
        parts = []
        for part, heads in (
            ("q", model.num_heads),
            ("k", model.num_kv_heads),
            ("v", model.num_kv_heads),
        ):
            full = normal(
                f"{name}.{part}",
                (heads * model.head_dim, model.hidden_size),
                seed=config.seed,
                device=layout.device,
            )
            parts.append(shard(full, axis=0, rank=layout.tensor_rank, ranks=ranks))
        self.qkv = parameter(torch.cat(parts), layout.device, config)
        full = normal(
            f"{name}.output",
            (model.hidden_size, model.num_heads * model.head_dim),
            seed=config.seed,
            device=layout.device,
            gain=(2 * len(model.layers)) ** -0.5,
        )
        self.output = parameter(
            shard(full, axis=1, rank=layout.tensor_rank, ranks=ranks), layout.device, config
        )
        self._scale = config.adapters.scale if config.adapters else 1.0
        queries, keys = self._heads * self._head_dim, self._kv_heads * self._head_dim
        self._inputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self._outputs = {"o_proj": model.hidden_size}
        self.qkv_adapters = adapters_of(
            config, layout.device, name=name, inputs=model.hidden_size, parts=self._inputs
        )
        self.output_adapters = adapters_of(
            config, layout.device, name=name, inputs=queries, parts=self._outputs
        )
        cosine, sine = rotary_tables(
            config.sequence_length,
            head_dim=model.head_dim,
            theta=model.rope_theta,
            dtype=compute_type(config),
            device=layout.device,
        )
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = gather_sequence(x, self._group)
        batch, sequence, _ = x.shape
        qkv = adapted_linear(
            x, self.qkv, self.qkv_adapters, parts=self._inputs, scale=self._scale
        ).view(batch, sequence, self._heads + 2 * self._kv_heads, self._head_dim)
        rotated = self._heads + self._kv_heads
        query_key = rotary(qkv[:, :, :rotated], self.cosine, self.sine)
        # Copied, so that it does not keep the storage of all of qkv alive until the backward.
        value = qkv[:, :, rotated:].contiguous()
        mixed = nn.functional.scaled_dot_product_attention(
            query_key[:, :, : self._heads].transpose(1, 2),
            query_key[:, :, self._heads :].transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=self._heads != self._kv_heads,
        )
        y = adapted_linear(
            mixed.transpose(1, 2).flatten(2),
            self.output,
            self.output_adapters,
            parts=self._outputs,
            scale=self._scale,
        )
        return scatter_sequence(y, self._group)
