"""Architectural features that some models have and some launch targets lack.

`features` derives them from a `ModelSpec`; tuner/engines/capabilities.py says which target lacks
which.

Not covered: what every target can build (GQA, rotary embeddings, RMS norms, SwiGLU) and what only
affects numerical results (rope scaling, routed scaling factors).
"""

from enum import StrEnum

from profilers.steps.config import LayerKind
from tuner.spec.model import ModelSpec, QkNorm


class ModelFeature(StrEnum):
    """A feature that some models have and some targets lack."""

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
    """OLMoE."""
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


def features(model: ModelSpec) -> frozenset[ModelFeature]:
    """Return what the model has that a target may lack."""
    attention, moe = model.attention, model.moe
    mla = attention.kind == "mla"
    is_present = {
        ModelFeature.MLA: mla,
        ModelFeature.MLA_BIAS: mla and attention.qkv_bias,
        ModelFeature.QKV_BIAS: not mla and attention.qkv_bias,
        ModelFeature.OUTPUT_BIAS: attention.output_bias,
        ModelFeature.QK_NORM_HEAD: attention.qk_norm is QkNorm.HEAD,
        ModelFeature.QK_NORM_FULL: attention.qk_norm is QkNorm.FULL,
        ModelFeature.SINKS: attention.has_sinks,
        ModelFeature.SLIDING_WINDOW: any(model.windowed),
        ModelFeature.UNGATED_FFN: not model.ffn_is_gated,
        ModelFeature.FFN_BIAS: model.ffn_bias and LayerKind.DENSE in model.layers,
    }
    if moe is not None and model.num_moe_layers:
        softmax = moe.scoring == "softmax"
        is_present |= {
            ModelFeature.EXPERT_BIAS: moe.expert_bias,
            ModelFeature.ROUTER_BIAS: moe.router_bias,
            ModelFeature.SHARED_GATE: moe.shared_expert_gate,
            ModelFeature.SIGMOID: not softmax,
            ModelFeature.SOFTMAX_UNNORMALISED: softmax and not moe.normalise_top_k,
            ModelFeature.SIGMOID_UNNORMALISED: not softmax and not moe.normalise_top_k,
            ModelFeature.SIGMOID_CORRECTION: not softmax and moe.score_correction_bias,
            ModelFeature.SOFTMAX_CORRECTION: softmax and moe.score_correction_bias,
            ModelFeature.GROUPED_ROUTING: moe.groups_per_token < moe.num_groups,
        }
    return frozenset(feature for feature, present in is_present.items() if present)
