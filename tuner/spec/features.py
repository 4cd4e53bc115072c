"""Architectural features that some models have and some launch targets lack.

`features` derives them from a `ModelSpec`; tuner/catalog/programs.py says which target lacks
which.

Not covered: what every target can build (GQA, rotary embeddings, RMS norms, SwiGLU) and what only
affects numerical results (rope scaling, routed scaling factors).
"""

from enum import StrEnum
from typing import Final

from profilers.steps.config import LayerKind
from tuner.spec.linear_attention import LinearAttention, LinearName
from tuner.spec.model import Mixer, ModelSpec, QkNorm


class ModelFeature(StrEnum):
    """A feature that some models have and some targets lack, each with models that have it."""

    MLA = "multi-head latent attention"
    """Compressed queries, keys and values (DeepSeek, Kimi)."""
    MLA_BIAS = "biases on the down-projections of latent attention"
    """`attention_bias` of a DeepSeek config."""
    QKV_BIAS = "biases on the query, key and value projections"
    """Qwen2, GLM-4.5, gpt-oss."""
    OUTPUT_BIAS = "a bias on the attention output projection"
    """gpt-oss."""
    QK_NORM_HEAD = "query and key norms per head"
    """Qwen3, GLM-4.5."""
    QK_NORM_FULL = "query and key norms over all heads at once"
    """OLMoE, MiniMax-M2."""
    QK_NORM_UNWEIGHTED = "query and key norms without weights"
    """Llama-4."""
    OUTPUT_GATE = "a gate on the output of attention"
    """Qwen3-Next, Qwen3.5."""
    SPARSE_ATTENTION = "attention to the tokens that an indexer picks"
    """DeepSeek-V3.2, GLM-5."""
    SHARED_INDEXERS = "attention to the tokens that the indexer of an earlier layer picked"
    """GLM-5.2."""
    COMPRESSED_ATTENTION = "attention to entries that merge tokens"
    """DeepSeek-V4: compressed sparse and heavily compressed attention."""
    HYPER_CONNECTIONS = "residual streams with hyper-connections"
    """DeepSeek-V4."""
    CHUNKED_ATTENTION = "attention inside chunks of the sequence"
    """Llama-4, in three of four layers."""
    MAMBA2 = "Mamba-2 layers"
    """Nemotron-H, Nemotron-3."""
    MAMBA2_VARIANT = "Mamba-2 layers whose kernel, chunks or biases are not Nemotron's"
    """Convolutions over 4 tokens with a bias, chunks of 128, projections without one."""
    GATED_DELTA = "layers with the gated delta rule"
    """Qwen3-Next, Qwen3.5."""
    KDA = "layers with Kimi delta attention"
    """Kimi Linear."""
    SEPARATE_LAYERS = "layers that are a mixer or a network alone"
    """Nemotron-H, Nemotron-3."""
    SINKS = "attention sinks"
    """gpt-oss."""
    SLIDING_WINDOW = "sliding-window attention"
    """gpt-oss on every other layer."""
    UNGATED_FFN = "feed-forward networks of two matrices"
    """Models before SwiGLU."""
    FFN_BIAS = "biases in dense feed-forward networks"
    """Models before Llama."""
    EXPERT_BIAS = "biases in the experts"
    """gpt-oss."""
    ROUTER_BIAS = "a learned bias on the router's logits"
    """gpt-oss."""
    SHARED_GATE = "a gate on the shared expert"
    """Qwen2-MoE."""
    SIGMOID = "sigmoid router scores"
    """DeepSeek-V3, GLM-4.5, Kimi-K2."""
    SQRT_SOFTPLUS = "square roots of softplus as router scores"
    """DeepSeek-V4."""
    HASH_ROUTING = "layers whose experts a table chooses by the token"
    """DeepSeek-V4, in its first three layers."""
    SOFTMAX_UNNORMALISED = "softmax scores that are not scaled to sum to one"
    """OLMoE, DeepSeek-V2."""
    SIGMOID_UNNORMALISED = "sigmoid scores that are not scaled to sum to one"
    """No public model; a config can say so."""
    SIGMOID_CORRECTION = "a correction bias on sigmoid scores"
    """DeepSeek-V3's loss-free balancing."""
    SOFTMAX_CORRECTION = "a correction bias on softmax scores"
    """ERNIE-4.5."""
    GROUPED_ROUTING = "group-limited routing"
    """DeepSeek-V2 and V3."""
    LATENT_EXPERTS = "experts on a latent width"
    """Nemotron-3 Super and Ultra."""
    ZERO_EXPERTS = "zero-computation experts"
    """LongCat-Flash, MoE++: experts that return their input."""
    SHORTCUT_MOE = "shortcut-connected experts"
    """LongCat-Flash: their output joins the residual a layer later."""


DEEPSEEK_V4: Final = frozenset(
    {
        ModelFeature.COMPRESSED_ATTENTION,
        ModelFeature.HYPER_CONNECTIONS,
        ModelFeature.SQRT_SOFTPLUS,
        ModelFeature.HASH_ROUTING,
    }
)
"""Features of DeepSeek-V4 that come together."""

LONGCAT: Final = frozenset({ModelFeature.ZERO_EXPERTS, ModelFeature.SHORTCUT_MOE})
"""Features of LongCat-Flash that come together."""

NEW_MIXERS: Final = DEEPSEEK_V4 | frozenset(
    {
        ModelFeature.OUTPUT_GATE,
        ModelFeature.SPARSE_ATTENTION,
        ModelFeature.SHARED_INDEXERS,
        ModelFeature.CHUNKED_ATTENTION,
        ModelFeature.MAMBA2,
        ModelFeature.MAMBA2_VARIANT,
        ModelFeature.GATED_DELTA,
        ModelFeature.KDA,
        ModelFeature.SEPARATE_LAYERS,
    }
)
"""Mixers other than plain attention, and what comes with them."""

_NEMOTRON_MAMBA2: Final = (4, 128, True, False)
"""Kernel and chunk of Nemotron's Mamba-2, and biases of its convolution and projections."""


def features(model: ModelSpec) -> frozenset[ModelFeature]:
    """Return what the model has that a target may lack."""
    attention, moe = model.attention, model.moe
    mla = attention.kind == "mla"
    linear = model.linear.kind if model.linear is not None else None
    is_present = {
        ModelFeature.MLA: mla,
        ModelFeature.MLA_BIAS: mla and attention.qkv_bias,
        ModelFeature.QKV_BIAS: not mla and attention.qkv_bias,
        ModelFeature.OUTPUT_BIAS: attention.output_bias,
        ModelFeature.QK_NORM_HEAD: attention.qk_norm is QkNorm.HEAD,
        ModelFeature.QK_NORM_FULL: attention.qk_norm is QkNorm.FULL,
        ModelFeature.SINKS: attention.has_sinks,
        ModelFeature.QK_NORM_UNWEIGHTED: attention.qk_norm is QkNorm.UNWEIGHTED,
        ModelFeature.OUTPUT_GATE: attention.has_output_gate,
        ModelFeature.SPARSE_ATTENTION: attention.indexer is not None,
        ModelFeature.SHARED_INDEXERS: any(model.shared_indexers),
        ModelFeature.COMPRESSED_ATTENTION: attention.kind == "shared_kv",
        ModelFeature.HYPER_CONNECTIONS: model.residual_streams > 1,
        ModelFeature.SLIDING_WINDOW: any(model.windowed) and not attention.window_is_chunk,
        ModelFeature.CHUNKED_ATTENTION: any(model.windowed) and attention.window_is_chunk,
        ModelFeature.MAMBA2: linear is LinearName.MAMBA2,
        ModelFeature.MAMBA2_VARIANT: _is_mamba2_variant(model.linear),
        ModelFeature.GATED_DELTA: linear is LinearName.GATED_DELTA,
        ModelFeature.KDA: linear is LinearName.KDA,
        ModelFeature.SEPARATE_LAYERS: LayerKind.NONE in model.layers or Mixer.NONE in model.mixers,
        ModelFeature.UNGATED_FFN: not model.ffn_is_gated,
        ModelFeature.FFN_BIAS: model.ffn_bias and LayerKind.DENSE in model.layers,
    }
    if moe is not None and model.num_moe_layers:
        softmax, sigmoid = moe.scoring == "softmax", moe.scoring == "sigmoid"
        is_present |= {
            ModelFeature.EXPERT_BIAS: moe.expert_bias,
            ModelFeature.ROUTER_BIAS: moe.router_bias,
            ModelFeature.SHARED_GATE: moe.shared_expert_gate,
            ModelFeature.SIGMOID: sigmoid,
            ModelFeature.SQRT_SOFTPLUS: moe.scoring == "sqrtsoftplus",
            ModelFeature.HASH_ROUTING: moe.num_hash_layers > 0,
            ModelFeature.SOFTMAX_UNNORMALISED: softmax and not moe.normalise_top_k,
            ModelFeature.SIGMOID_UNNORMALISED: sigmoid and not moe.normalise_top_k,
            ModelFeature.SIGMOID_CORRECTION: sigmoid and moe.score_correction_bias,
            ModelFeature.SOFTMAX_CORRECTION: softmax and moe.score_correction_bias,
            ModelFeature.GROUPED_ROUTING: moe.groups_per_token < moe.num_groups,
            ModelFeature.LATENT_EXPERTS: moe.latent_size > 0,
            ModelFeature.ZERO_EXPERTS: moe.zero_experts > 0,
            ModelFeature.SHORTCUT_MOE: moe.is_shortcut,
        }
    return frozenset(feature for feature, present in is_present.items() if present)


def _is_mamba2_variant(linear: LinearAttention | None) -> bool:
    if linear is None or linear.kind is not LinearName.MAMBA2:
        return False
    shape = (linear.conv_kernel, linear.chunk_size, linear.conv_bias, linear.projection_bias)
    return shape != _NEMOTRON_MAMBA2
