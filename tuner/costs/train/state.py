"""Parameters of one rank, and the bytes that belong to each: weights, gradients, optimizer.

Counts are of one device, tensor parallelism taken off. Of a layer, in parameters:

    attention     h (2 a d + 2 g d) / T     grouped queries: q, k, v, output
                  h r_q + h (r_kv + rope) + (r_q a d + r_kv a (d - rope + v) + a v h) / T      MLA
                  h r_q + h d + (r_q a d + a d o + G o h) / T     shared KV, output groups G of o
    compressor    h c + r_q a_i d_i + h a_i    c outputs; queries and weights of an indexer
    streams       (2 + S) S S h           a hyper-connection each of mixer and network
    linear        (h w + r x + H P h) / T   w, x outputs of projections, r a low rank, H P values
    dense FFN     3 h F / T                 2 h F / T where it is not gated
    MoE           h E + 3 h F_s / T         router and shared experts; 2 h l of a latent width l
                  3 h F_e E / (EP ETP)      experts; l instead of h

and h V / T each for embedding and head. Bytes of one parameter, with S the ranks it is sharded
over:

    ZeRO 0        w + G + O                 w weight, G gradient, O fp32 master and two moments
    ZeRO 1        w + G + O / S             Megatron's distributed optimizer
    ZeRO 2        w + (G + O) / S
    ZeRO 3        (w + G + O) / S           16-bit shards are gathered, beside them lies the master
    FSDP2         (G + O) / S               the master is the parameter, gathered as 16-bit casts

Without a low-precision copy w is the master, and O its two moments.

S is DP CP for dense parameters and EDP for experts, over the number of copies (links.py).

Letters: h hidden, a query heads, g key-value heads, d width of a query head, v of a value head, r
low ranks, F widths, E experts, V vocabulary padded as Megatron pads it.

Sources: Megatron-LM, megatron/training/theoretical_memory_usage.py (6 + 12 / d bytes with the
distributed optimizer); Rajbhandari et al., SC 2020 (ZeRO); torchtitan, docs/fsdp.md (fp32 sharded
parameters, 16 bytes). DeepSpeed 0.19.8, runtime/zero/stage3.py: `lp_param_buffer` keeps 16-bit
shards, `fp32_partitioned_groups_flat` their fp32 copies, unless parameters are fp32 themselves.
megatron-core 0.16 to 0.19, distributed/fsdp: `model_weight_buffer` and `main_weight_buffer`.
Frozen parameters and adapters: adapters.py.

Under ZeRO 1 and 2 DeepSpeed's step joins a rank's gradients, G / S, in one tensor and casts that
to the master's type before it frees any: 2 G / S and the cast, without activations
(runtime/zero/stage_1_and_2.py). PyTorch's AdamW then takes no more.
Not covered: biases, positions that are learned.
"""

from dataclasses import dataclass

import numpy as np

from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import ModelShape
from tuner.prices.train.collectives import num_copies

VOCAB_MULTIPLE = 128.0
"""Megatron-LM's --make-vocab-size-divisible-by."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parameters:
    """Parameters on one device."""

    attention: Numbers
    """Attention of a multi-token-prediction layer, what is around mixer and network included."""
    dense_mixer: Numbers
    """Attention or linear attention of a layer without experts, its norms included."""
    moe_mixer: Numbers
    """Attention or linear attention of a layer with experts, its norms included."""
    dense_ffn: Numbers
    """Feed-forward network of a layer without experts."""
    moe_outside: Numbers
    """Router and shared experts of a layer."""
    experts: Numbers
    """All experts of a layer that the device holds."""
    one_expert: Numbers
    vocab: Numbers
    """Parameters of the embedding, or of the head."""
    mtp_projection: Numbers
    """The projection at the input of a multi-token-prediction layer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateBytes:
    """Bytes of one parameter on the device."""

    weight: Numbers
    gradient: Numbers
    optimizer: Numbers


def padded_vocab(model: ModelShape, strategies: Strategies) -> Numbers:
    """Entries of the vocabulary when every tensor rank gets whole blocks of 128."""
    block = VOCAB_MULTIPLE * strategies.tensor
    return np.ceil(model.vocab / block) * block


def parameters(model: ModelShape, strategies: Strategies) -> Parameters:
    """Count the parameters of each part on one device."""
    hidden, split = model.hidden, strategies.tensor
    matrices = 2.0 + model.is_gated
    expert = matrices * model.expert_hidden * model.moe_ffn / strategies.expert_tensor
    around = hidden + connection_matrix(model)
    bare = attention_matrices(model.without_compressors, split) + around
    attention = attention_matrices(model, split) + around
    linear = linear_weights(model, split) + around if model.has_linear else 0.0
    return Parameters(
        attention=bare + around,
        dense_mixer=model.dense_attention * attention
        + model.dense_linear * linear
        + model.dense_network * around,
        moe_mixer=model.moe_attention * attention + model.moe_linear * linear + around,
        dense_ffn=model.dense_network * matrices * hidden * model.dense_ffn / split,
        moe_outside=hidden * (model.router_outputs + 2.0 * model.moe_latent)
        + matrices * hidden * model.shared_ffn / split,
        experts=expert * model.experts / strategies.expert,
        one_expert=expert,
        vocab=hidden * padded_vocab(model, strategies) / split,
        mtp_projection=2.0 * hidden * hidden / split,
    )


def connection_matrix(model: ModelShape) -> Numbers:
    """Parameters of a hyper-connection, whole on every tensor rank; 0 of a plain residual."""
    streams = model.streams
    return model.has_streams * (2.0 + streams) * streams**2 * model.hidden


def linear_weights(model: ModelShape, split: Numbers) -> Numbers:
    """Matrices of one block of linear attention on one of so many tensor ranks."""
    outer = model.hidden * (model.linear_inputs + model.linear_values)
    return (outer + model.linear_rank * model.linear_rank_outputs) / split


def attention_matrices(model: ModelShape, split: Numbers) -> Numbers:
    """Matrices of one attention block on one of so many tensor ranks, averaged over compressors."""
    hidden, heads = model.hidden, model.heads
    output = heads * model.value_dim * hidden / split
    queries = heads * model.head_dim
    keys_values = model.kv_heads * (model.head_dim + model.value_dim)
    gates = model.has_output_gate * queries
    grouped = hidden * (queries + gates + keys_values) / split + output
    has_low_rank = model.q_lora_rank > 0.0
    up_queries = np.where(
        has_low_rank,
        model.q_lora_rank * (hidden + queries / split),
        hidden * queries / split,
    )
    up_keys_values = heads * (model.head_dim - model.rope_dim + model.value_dim) / split
    latent = (
        up_queries
        + hidden * (model.kv_lora_rank + model.rope_dim)
        + model.kv_lora_rank * up_keys_values
        + output
        + model.index_share
        * (
            model.index_heads * (model.q_lora_rank * model.index_dim + hidden)
            + hidden * model.index_dim
        )
    )
    shared = (
        model.q_lora_rank * (hidden + queries / split)
        + hidden * model.head_dim
        + model.output_rank * (queries + model.output_groups * hidden) / split
        + _compressors(model)
    )
    plain = grouped + model.is_mla * (latent - grouped)
    return plain + model.is_shared_kv * (shared - plain)


def _compressors(model: ModelShape) -> Numbers:
    """Matrices of a layer's compressor on average, whole on every tensor rank."""
    outputs = model.csa_share * model.csa_outputs + model.hca_share * model.hca_outputs
    scorer = model.index_heads * (model.q_lora_rank * model.index_dim + model.hidden)
    return model.hidden * outputs + model.csa_share * scorer


def shard_ranks(strategies: Strategies) -> tuple[Numbers, Numbers]:
    """Devices that share one parameter's state: dense ones, experts."""
    copies = num_copies(strategies)
    dense = strategies.data * strategies.context
    return dense / copies, np.maximum(1.0, strategies.expert_data / copies)


def state_bytes(
    strategies: Strategies,
    *,
    ranks: Numbers,
    master_bytes: Numbers,
    moments_bytes: Numbers,
    gathers_master: Numbers,
) -> StateBytes:
    """Bytes of one parameter whose state is shared by `ranks` devices."""
    stage, stored, s = np.asarray(strategies.zero_stage), strategies.weight_bytes, strategies
    master_bytes = np.where(np.greater(s.master_bytes, 0.0), s.master_bytes, master_bytes)
    moments_bytes = np.where(np.greater(s.moments_bytes, 0.0), s.moments_bytes, moments_bytes)
    # fp32 shards need no fp32 copy.
    is_one = np.greater(gathers_master, 0.0) | np.greater_equal(stored, master_bytes)
    shard = np.where(is_one, master_bytes, stored)
    # Transformers' optimizer updates the very parameters that layers read.
    is_whole = np.greater(s.eager_modules, 0.0) & (stage < 1.0)
    is_same = ((stage >= 3.0) & is_one) | is_whole | np.greater(s.updates_weights, 0.0)
    owns_master = np.where(is_same, 0.0, master_bytes)
    on_device, resident = 1.0 - s.optimizer_offload, 1.0 - s.parameter_offload
    return StateBytes(
        weight=np.where(stage >= 3.0, shard / ranks * resident, stored) + s.reference_bytes,
        gradient=s.gradient_bytes / np.where(stage >= 2.0, ranks, 1.0) * resident,
        optimizer=(owns_master + moments_bytes) * on_device / np.where(stage >= 1.0, ranks, 1.0),
    )
