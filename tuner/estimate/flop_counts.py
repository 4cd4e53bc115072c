"""FLOPs of one training step, by three conventions that users meet.

    model       tuner/spec/accounting.py: GEMMs of forward and backward pass, causal
                attention by the pairs that are attended, the head, routed experts that are used;
                nothing for recomputation. Multi-token-prediction layers count when they are
                trained, gradients of weights unless adapters are. MFU is these over time and peak.
    hardware    model, plus the forward GEMMs that are recomputed. HFU.
    megatron    what Megatron-LM prints as TFLOP/s/GPU (`num_floating_point_operations` of
                `megatron/training/training.py`, core_v0.16.1 and later): half the square of the
                sequence for causal attention, multi-token prediction with its heads, no router, the
                vocabulary as it is padded. Before 0.12 the whole square counted.

Not covered: what kernels execute beyond that (masked blocks, padding, idle experts).
"""

from typing import Final

from profilers.steps.config import LayerKind, Recompute
from tuner.costs.train.packing import PackedRows
from tuner.estimate.configuration import Configuration
from tuner.spec.accounting import (
    attention_weights,
    forward_flop_per_token,
    training_flop_per_token,
    with_mtp,
)
from tuner.spec.linear_attention import LinearName, linear_weights
from tuner.spec.model import ModelSpec

CONVENTION: Final = (
    "model FLOPs: 3 x forward GEMMs, causal attention by attended pairs, head and used "
    "experts counted, recomputation not"
)
FROZEN: Final = ", nor gradients of the weights that adapters leave as they are"
"""Addition to the convention where adapters are trained."""
VOCABULARY_MULTIPLE: Final = 128
"""Megatron-LM's --make-vocab-size-divisible-by."""


def model_flop(config: Configuration, model: ModelSpec, *, rows: PackedRows | None = None) -> float:
    """Model FLOPs of one step, of which padding of packed rows has none."""
    classes = ((float(config.sequence), 1.0),) if rows is None else rows.classes
    return _tokens(config) * sum(
        share * training_flop_per_token(model, sequence_length=length, mtp_layers=config.mtp_layers)
        for length, share in classes
    )


def frozen_flop(config: Configuration, model: ModelSpec) -> float:
    """FLOPs of one step for gradients of the model's weights, which adapters do not need."""
    extended = with_mtp(model, config.mtp_layers)
    forward = forward_flop_per_token(extended, sequence_length=config.sequence)
    return _tokens(config) * (forward.total - forward.attention_core - forward.linear_scan)


def recomputed_flop(
    config: Configuration, model: ModelSpec, *, document: float | None = None
) -> float:
    """Recomputed FLOPs of one step, of documents of so many tokens; None: of whole sequences.

    torchtitan's per-operation checkpointing keeps attention and every second GEMM, in eager mode
    grouped ones excepted.
    """
    forward = forward_flop_per_token(
        with_mtp(model, config.mtp_layers), sequence_length=document or config.sequence
    )
    if config.recompute is Recompute.FULL:
        recomputed = config.recompute_ratio * (forward.total - forward.head)
        return _tokens(config) * recomputed
    if config.recompute_by_op:
        repeated = forward.total - forward.head - forward.attention_core
        repeated += forward.routed_experts if config.has_eager_layers else 0.0
        return _tokens(config) * 0.5 * repeated
    by_module = {
        "core_attn": forward.attention_core,
        "mlp": forward.dense_ffn,
        "moe": forward.router + forward.routed_experts + forward.shared_experts,
        "shared_experts": forward.shared_experts,
        "mla_up_proj": _up_projections(model),
    }
    covered = [part for part in config.recompute_modules if part in by_module]
    if "moe" in covered:
        covered = [part for part in covered if part != "shared_experts"]
    return _tokens(config) * sum(by_module[part] for part in covered)


def megatron_flop(config: Configuration, model: ModelSpec) -> float:
    """FLOPs of one step as Megatron-LM counts them.

    In hybrids it leaves out what joins the hidden states of multi-token prediction.
    """
    moe, hidden = model.moe, model.hidden_size
    extended = with_mtp(model, config.mtp_layers)
    matrices = 3 if model.ffn_is_gated else 2
    dense = extended.layers.count(LayerKind.DENSE)
    networks = float(dense * matrices * model.dense_ffn_size)
    if moe is not None:
        ratio = model.expert_hidden / hidden
        width = moe.computed_top_k * moe.expert_ffn_size * ratio + moe.shared_ffn_size
        networks += extended.num_moe_layers * (matrices * width + 2 * moe.latent_size)
    block = VOCABULARY_MULTIPLE * config.tensor
    vocabulary = -(-model.vocab_size // block) * block
    per_token = 6.0 * (
        hidden * networks
        + _attention_multiply_adds(extended, sequence=config.sequence)
        + extended.num_linear_layers * _linear_multiply_adds(model)
        + config.mtp_layers * (0 if model.mixers else 3 * hidden + 2 * hidden * hidden)
        + (config.mtp_layers + 1) * hidden * vocabulary
    )
    return _tokens(config) * per_token


def _attention_multiply_adds(model: ModelSpec, *, sequence: int) -> float:
    """Multiply-adds of all attention layers and one token, half of their forward FLOPs.

    Half the square of the sequence, but windows and entries as they are (Megatron-Bridge v0.6.0,
    training/utils/flop_utils.py, "dsv4_hybrid").
    """
    attention = model.attention
    if attention.kind == "shared_kv":
        flop = forward_flop_per_token(model, sequence_length=sequence)
        return (flop.attention_projections + flop.attention_core) / 2
    heads = attention.num_heads * (attention.head_dim + attention.value_head_dim)
    return model.num_attention_layers * (attention_weights(model) + sequence * heads / 2)


def _linear_multiply_adds(model: ModelSpec) -> float:
    """Multiply-adds of one layer of linear attention and token, half of its forward FLOPs.

    Megatron-LM takes twice the hidden size for the inner width of Mamba-2, whatever it is, and 7
    operations per element of the state (`mamba_layer_flops`); 8 per element of a value head's
    square for the gated delta rule (`gdn_layer_flops`).
    """
    linear, hidden = model.linear, model.hidden_size
    if linear is None:
        return 0.0
    if linear.kind is LinearName.MAMBA2:
        inner = 2 * hidden
        inputs = 2 * inner + 2 * linear.key_dim + linear.num_value_heads
        return hidden * (inputs + inner) + 3.5 * inner * linear.key_head_dim
    scan = 4.0 * linear.num_value_heads * linear.value_head_dim**2
    return linear_weights(linear, hidden=hidden) + scan


def _tokens(config: Configuration) -> float:
    return float(config.global_batch * config.sequence)


def _up_projections(model: ModelSpec) -> float:
    """FLOPs per token of MLA's up-projections, all layers."""
    attention = model.attention
    queries = (attention.q_lora_rank or 0) * attention.num_heads * attention.head_dim
    keys_values = (
        attention.kv_lora_rank
        * attention.num_heads
        * (attention.qk_nope_head_dim + attention.v_head_dim)
    )
    return 2.0 * model.num_layers * (queries + keys_values)
