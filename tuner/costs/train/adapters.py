"""Low-rank adapters: which matrices have one, what they count, and the bytes of frozen weights.

An adapter of rank r beside a matrix [i, o] has r (i + o) parameters, over the tensor-parallel
ranks as the matrix is. Fused adapters (Megatron's linear_qkv and linear_fc1) read their input once:
r (i + o_1 + o_2 + ...). A stack of E experts has E adapters of the fused gate and up, and E of
down. Only adapters have gradients and optimizer state:

    frozen        quantised or 16-bit bytes; sharded under ZeRO 3
    original      that a frozen parameter is cast from, if any (FSDP2's mixed precision); sharded
                  under ZeRO 1, and all that there is of the parameter under ZeRO 3
    adapter       its own bytes, sharded under ZeRO 3; gradient under ZeRO 2; moments under ZeRO 1

nf4 in blocks of 64 with double quantisation takes 4 bits, 8 / 64 of the first scales and
32 / (64 * 256) of the second: 0.5159 bytes a parameter (Dettmers et al., arXiv:2305.14314, section
3). It covers attention and dense networks; stacked experts, router, embedding, head and norms stay
as they are (bitsandbytes replaces nn.Linear, and not the head).

Projections of linear attention that read the same are priced as so many of their mean width.

Not covered: biases of adapters, DoRA, adapters of multi-token prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdaptedMatrix:
    """A matrix that may have an adapter."""

    ratio: Numbers
    """1 where the matrix has an adapter; of several matrices of one width, how many have."""
    inputs: Numbers
    outputs: Numbers
    shares_input: Numbers = 0.0
    """1 where a fused adapter before it in the list reads the input."""
    present: Numbers = 1.0
    """1 where the model has the matrix."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterCounts:
    """Trained parameters of one layer's parts on one device."""

    attention: Numbers
    linear: Numbers
    dense: Numbers
    shared: Numbers
    experts: Numbers
    """Parameters of all experts that the device holds."""

    def dense_layer(self, model: ModelShape) -> Numbers:
        """Return the adapter parameters of a layer without experts."""
        mixers = model.dense_attention * self.attention + model.dense_linear * self.linear
        return mixers + model.dense_network * self.dense

    def moe_layer(self, model: ModelShape) -> Numbers:
        """Return the adapter parameters of a layer with experts, without those of the experts."""
        mixers = model.moe_attention * self.attention + model.moe_linear * self.linear
        return mixers + self.shared


def attention_matrices(m: ModelShape, s: Strategies) -> tuple[AdaptedMatrix, ...]:
    """Return attention's projections."""
    queries, values = m.heads * m.head_dim, m.heads * m.value_dim
    is_mla = np.where(np.greater(m.is_mla, 0.0), 1.0, 0.0)
    has_rank = np.where(np.greater(m.q_lora_rank, 0.0), 1.0, 0.0)
    q_input = np.where(is_mla * has_rank > 0.0, m.q_lora_rank, m.hidden)
    up = m.heads * (m.head_dim - m.rope_dim + m.value_dim)
    fused = s.fused_qkv_adapters * (1.0 - is_mla)
    return (
        AdaptedMatrix(
            ratio=s.adapts_q, inputs=q_input, outputs=queries * (1.0 + m.has_output_gate)
        ),
        AdaptedMatrix(
            ratio=s.adapts_k,
            inputs=np.where(is_mla > 0.0, m.kv_lora_rank, m.hidden),
            outputs=np.where(is_mla > 0.0, up, m.kv_heads * m.head_dim),
            shares_input=fused * s.adapts_q,
        ),
        AdaptedMatrix(
            ratio=s.adapts_v,
            inputs=m.hidden,
            outputs=m.kv_heads * m.value_dim,
            shares_input=fused * np.maximum(s.adapts_q, s.adapts_k),
            present=1.0 - is_mla,
        ),
        AdaptedMatrix(
            ratio=s.adapts_q_down,
            inputs=m.hidden,
            outputs=m.q_lora_rank,
            present=is_mla * has_rank,
        ),
        AdaptedMatrix(
            ratio=s.adapts_kv_down,
            inputs=m.hidden,
            outputs=m.kv_lora_rank + m.rope_dim,
            present=is_mla,
        ),
        AdaptedMatrix(ratio=s.adapts_o, inputs=values, outputs=m.hidden),
    )


def linear_matrices(m: ModelShape, s: Strategies) -> tuple[AdaptedMatrix, ...]:
    """Return projections of linear attention: of the hidden state, of low ranks, of its output."""
    return (
        AdaptedMatrix(
            ratio=s.linear_adapters,
            inputs=m.hidden,
            outputs=s.linear_adapter_outputs / np.maximum(s.linear_adapters, 1.0),
        ),
        AdaptedMatrix(
            ratio=s.linear_rank_adapters,
            inputs=m.linear_rank,
            outputs=s.linear_rank_adapter_outputs / np.maximum(s.linear_rank_adapters, 1.0),
        ),
        AdaptedMatrix(ratio=s.adapts_linear_out, inputs=m.linear_values, outputs=m.hidden),
    )


def network_matrices(m: ModelShape, s: Strategies, width: Numbers) -> tuple[AdaptedMatrix, ...]:
    """Return the projections of a dense or shared network."""
    has_gate = s.adapts_gate * m.is_gated
    return (
        AdaptedMatrix(ratio=has_gate, inputs=m.hidden, outputs=width, present=m.is_gated),
        AdaptedMatrix(
            ratio=s.adapts_up,
            inputs=m.hidden,
            outputs=width,
            shares_input=s.fused_gate_adapters * has_gate,
        ),
        AdaptedMatrix(ratio=s.adapts_down, inputs=width, outputs=m.hidden),
    )


def adapter_counts(m: ModelShape, s: Strategies) -> AdapterCounts:
    """Count adapters' parameters on one device; all 0 where every weight is trained."""
    expert = m.expert_hidden + (1.0 + m.is_gated) * m.moe_ffn + m.moe_ffn + m.expert_hidden
    local = m.experts / (s.expert * s.expert_tensor)
    return AdapterCounts(
        attention=_count(attention_matrices(m, s), s),
        linear=_count(linear_matrices(m, s), s),
        dense=_count(network_matrices(m, s, m.dense_ffn), s),
        shared=_count(network_matrices(m, s, m.shared_ffn), s)
        * np.where(np.greater(m.shared_ffn, 0.0), 1.0, 0.0),
        experts=s.adapts_experts * s.adapter_rank * expert * local,
    )


def num_adapter_parameters(m: ModelShape, s: Strategies) -> Numbers:
    """Count adapters' parameters of the whole model, without multi-token prediction."""
    counts = adapter_counts(m, replace(s, tensor=1.0, expert=1.0, expert_tensor=1.0))
    moe = counts.moe_layer(m) + counts.experts
    return m.dense_layers * counts.dense_layer(m) + m.moe_layers * moe


def _count(matrices: Sequence[AdaptedMatrix], s: Strategies) -> Numbers:
    total: Numbers = 0.0
    for matrix in matrices:
        total = total + matrix.ratio * (
            matrix.inputs * (1.0 - matrix.shares_input) + matrix.outputs
        )
    return s.adapter_rank * total / s.tensor


def is_tuned(s: Strategies) -> bool:
    """Return whether any column trains adapters only."""
    return bool(np.any(np.greater(s.adapter_rank, 0.0)))


def frozen_bytes(s: Strategies) -> tuple[Numbers, Numbers]:
    """Bytes of a frozen parameter: of quantised linear layers, and of all others."""
    linear = np.where(np.greater(s.frozen_bytes, 0.0), s.frozen_bytes, s.weight_bytes)
    unquantised = np.where(
        np.greater(s.unquantised_bytes, 0.0), s.unquantised_bytes, s.weight_bytes
    )
    return linear, unquantised


def frozen_on_device(s: Strategies, frozen: Numbers, *, ranks: Numbers) -> Numbers:
    """Bytes of a frozen parameter on a device, an original included, over so many ranks."""
    stage, original = np.asarray(s.zero_stage), s.frozen_master_bytes
    sharded = np.where(np.greater(original, 0.0), original, frozen) / ranks
    return np.where(stage >= 3.0, sharded, frozen + original / np.where(stage >= 1.0, ranks, 1.0))


def keeps_input(s: Strategies, *adapts: Numbers) -> Numbers:
    """1 where a linear layer's input is kept: to train its weights, or the adapter's."""
    chosen: Numbers = s.is_full
    for has_adapter in adapts:
        chosen = np.maximum(chosen, has_adapter)
    return chosen
