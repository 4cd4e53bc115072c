"""megatron-core's fields of mixers other than plain attention, and of hybrids.

Two programs train such models. `pretrain_gpt.py` has layers of a mixer and a network, of which
`experimental_attention_variant` replaces some mixers by the gated delta rule, or all by sparse
attention. `pretrain_hybrid.py` (`pretrain_mamba.py` up to core 0.17) has Mamba-2 layers, and layers
that are a mixer or a network alone; its pattern also holds the pipeline stages.

Read from core_v0.16.1 to core_v0.19.0 of github.com/NVIDIA/Megatron-LM: `TransformerConfig`,
megatron/core/models/hybrid/ and megatron/core/ssm/. The mixer of Mamba-2 has a convolution over 4
tokens with a bias, chunks of 128 tokens and no other bias, none of which is a field.
"""

from typing import Final

from tuner.config.train import TrainDecision
from tuner.engines.reading.hybrid_pattern import MTP, STAGE_END, layer_letters, mtp_letters
from tuner.spec.features import ModelFeature, features
from tuner.spec.linear_attention import LinearName
from tuner.spec.model import Mixer, ModelSpec

Value = bool | int | float | str | tuple[str, ...] | tuple[int, ...] | None
"""Value of one field."""

HYBRIDS: Final = frozenset({ModelFeature.MAMBA2, ModelFeature.SEPARATE_LAYERS})
"""Features that only the program for hybrids builds."""


def is_hybrid(model: ModelSpec) -> bool:
    """Return whether the program for hybrids trains the model."""
    return bool(HYBRIDS & features(model))


def num_layers(model: ModelSpec) -> int:
    """Count layers as the program that trains the model does."""
    return len("".join(layer_letters(model))) if is_hybrid(model) else model.num_layers


def mixer_fields(model: ModelSpec) -> dict[str, Value]:
    """Return the fields that build mixers other than plain attention."""
    fields: dict[str, Value] = {}
    if model.attention.has_output_gate:
        fields["attention_output_gate"] = True
    if is_hybrid(model):
        fields["is_hybrid_model"] = True
    if model.linear is not None:
        fields |= _linear(model)
    if model.attention.indexer is not None:
        fields |= _sparse(model)
    return fields


def _linear(model: ModelSpec) -> dict[str, Value]:
    linear = model.linear
    assert linear is not None
    if linear.kind is LinearName.MAMBA2:
        return {
            "mamba_num_heads": linear.num_value_heads,
            "mamba_head_dim": linear.value_head_dim,
            "mamba_num_groups": linear.num_key_heads,
            "mamba_state_dim": linear.key_head_dim,
        }
    if linear.kind is not LinearName.GATED_DELTA:
        raise ValueError(f"megatron-core has no {linear.kind}")
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": tuple(int(mixer is Mixer.LINEAR) for mixer in model.mixers),
        "linear_num_key_heads": linear.num_key_heads,
        "linear_num_value_heads": linear.num_value_heads,
        "linear_key_head_dim": linear.key_head_dim,
        "linear_value_head_dim": linear.value_head_dim,
        "linear_conv_kernel_dim": linear.conv_kernel,
    }


def _sparse(model: ModelSpec) -> dict[str, Value]:
    indexer = model.attention.indexer
    assert indexer is not None
    return {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": indexer.num_heads,
        "dsa_indexer_head_dim": indexer.head_dim,
        "dsa_indexer_topk": indexer.top_k,
        # Sparse attention refuses the fused kernel of rotary positions.
        "apply_rope_fusion": False,
    }


def pattern(model: ModelSpec, decision: TrainDecision, *, has_stages: bool) -> str:
    """Return the layers of a hybrid as letters, by stage where the release has stages in them."""
    letters = layer_letters(model)
    stages, start = [], 0
    for count in decision.pipeline_layout:
        stages.append("".join(letters[start : start + count]))
        start += count
    separator = STAGE_END if has_stages and decision.pipeline_model_parallel_size > 1 else ""
    return separator.join(stages) + f"{MTP}{mtp_letters(model)}" * decision.mtp_num_layers
