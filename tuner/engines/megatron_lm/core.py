"""A decision in the field names of megatron-core's `TransformerConfig`, for two launchers.

`model_fields` builds the model, `decision_fields` runs it as decided. Every field that a decision
governs is given, also where it is off, because a Megatron-Bridge recipe may have it on; None is the
engine's default. Releases differ in a few names only: `Core`.

Names and rules were read from core_v0.16.1, core_v0.17.1, core_v0.18.0 and core_v0.19.0 of
github.com/NVIDIA/Megatron-LM; a test builds the class itself where the package is installed.

Not covered: rope scaling, partial rotary and routed scaling factors, which affect neither time nor
memory; kernel fusions that do not change the result.
"""

from enum import StrEnum
from typing import Final

from profilers.steps.config import LayerKind, Recompute
from tuner.catalog.rules.decision import global_chunks, global_recompute, selective_modules
from tuner.config.train import TrainDecision
from tuner.engines.megatron_lm.mixers import (
    Value,
    is_hybrid,
    mixer_fields,
    num_layers,
    pattern,
)
from tuner.spec.features import ModelFeature, features
from tuner.spec.model import Attention, ModelSpec, Moe, QkNorm


class Core(StrEnum):
    """Releases of megatron-core whose fields differ."""

    V0_16 = "0.16"
    """0.16, and what 0.17 still takes."""
    V0_17 = "0.17"
    """0.17: patterns of hybrids hold pipeline stages."""
    V0_18 = "0.18"
    """0.18 and later."""


GPT_OSS: Final = "GptOssForCausalLM"
"""The one architecture here whose experts are not SwiGLU but a clamped variant."""

NEMOTRON_H: Final = "NemotronHForCausalLM"
"""Squared ReLU, and attention without position embeddings."""

HYBRID_PATTERN: Final = {
    Core.V0_16: "hybrid_override_pattern",
    Core.V0_17: "hybrid_layer_pattern",
    Core.V0_18: "hybrid_layer_pattern",
}
"""The field of a hybrid's layers."""

_FP8_FORMAT: Final = {
    "delayed": "hybrid",
    "tensorwise": "hybrid",
    "blockwise": "e4m3",
    "mxfp8": "e4m3",
}
"""`hybrid` keeps gradients in e5m2; scales per block make e4m3 wide enough for them too."""

_OFFLOADED: Final = {
    "attn_norm": "layernorm",
    "qkv_linear": "mla_up_proj",
    "core_attn": "core_attn",
    "attn_proj": "core_attn",
    "mlp_norm": "layernorm",
    "expert_fc1": "moe",
    "moe_act": "moe_act",
}
"""Activations that can be offloaded, by the module whose recomputation makes that pointless."""

_PADDED_EXPERTS: Final[dict[str, Value]] = {
    "use_transformer_engine_op_fuser": True,
    "moe_mlp_glu_interleave_size": 32,
    "moe_pad_experts_for_cuda_graph_inference": True,
    "moe_expert_rank_capacity_factor": 1.5,
    "moe_paged_stash": True,
    "moe_paged_stash_buffer_size_factor_cuda": 1.2,
    "moe_paged_stash_buffer_size_factor_cpu": 1.0,
}
"""Fixed sizes of MoE layers under a CUDA graph of the whole step, with the capacities of the public
DeepSeek-V3 recipe of Megatron-Bridge 0.5."""


_NO_EXPERTS: Final[dict[str, Value]] = {
    "num_moe_experts": None,
    "moe_ffn_hidden_size": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_layer_freq": 1,
}


def model_fields(model: ModelSpec) -> dict[str, Value]:
    """Return the fields that build the model."""
    model_features = features(model)
    expert_ffn_size = model.moe.expert_ffn_size if model.moe else 0
    every_bias = ModelFeature.OUTPUT_BIAS in model_features
    gated: dict[str, Value] = {"activation_func": "silu", "gated_linear_unit": True}
    if model.architecture == GPT_OSS:
        gated |= {
            "activation_func": "quick_gelu",
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0,
        }
    return {
        "num_layers": num_layers(model),
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.dense_ffn_size or expert_ffn_size,
        **(gated if model.ffn_is_gated else {"gated_linear_unit": False}),
        "add_bias_linear": every_bias,
        "add_qkv_bias": ModelFeature.QKV_BIAS in model_features and not every_bias,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_epsilon,
        # Megatron's default dropout is 10 %.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **_attention(model.attention),
        **_window(model),
        **mixer_fields(model),
        **(_moe(model.moe, model) if model.moe and model.num_moe_layers else _NO_EXPERTS),
    }


def decision_fields(
    model: ModelSpec, decision: TrainDecision, *, precision: str, core: Core
) -> dict[str, Value]:
    """Return the fields that run the model as decided.

    Raises:
        ValueError: stages differ in what is one setting for Megatron.
    """
    flex = decision.dispatcher in ("deepep", "hybridep")
    return {
        "tensor_model_parallel_size": decision.tensor_model_parallel_size,
        "pipeline_model_parallel_size": decision.pipeline_model_parallel_size,
        **_stages(model, decision, core=core),
        "context_parallel_size": decision.context_parallel_size,
        "sequence_parallel": (
            decision.sequence_parallel and decision.tensor_model_parallel_size > 1
        ),
        "expert_model_parallel_size": decision.expert_model_parallel_size,
        # The engine's default is that of the dense layers.
        "expert_tensor_parallel_size": decision.expert_tensor_parallel_size,
        **(
            {
                "moe_token_dispatcher_type": "flex" if flex else decision.dispatcher,
                "moe_flex_dispatcher_backend": decision.dispatcher if flex else None,
            }
            if model.num_moe_layers
            else {}
        ),
        "overlap_moe_expert_parallel_comm": decision.a2a_overlap,
        "mtp_num_layers": decision.mtp_num_layers or None,
        **_recompute(model, decision),
        **_offload(model, decision),
        **_graph(model, decision, core=core),
        **precision_fields(precision),
    }


def precision_fields(precision: str) -> dict[str, Value]:
    """Return the fields of a precision of tuner/spec/goal.py; everything else runs in bf16."""
    recipe = precision.removeprefix("fp8-")
    fields: dict[str, Value] = {"fp8": _FP8_FORMAT.get(recipe), "fp4": None}
    if recipe in _FP8_FORMAT:
        fields["fp8_recipe"] = recipe
    if precision == "nvfp4":
        fields |= {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
    return fields


def _attention(attention: Attention) -> dict[str, Value]:
    sinks: dict[str, Value] = {"softmax_type": "learnable"} if attention.has_sinks else {}
    if attention.kind == "mla":
        return {
            "num_attention_heads": attention.num_heads,
            "multi_latent_attention": True,
            "q_lora_rank": attention.q_lora_rank,
            "kv_lora_rank": attention.kv_lora_rank,
            "qk_head_dim": attention.qk_nope_head_dim,
            "qk_pos_emb_head_dim": attention.qk_rope_head_dim,
            "v_head_dim": attention.v_head_dim,
            # The norms of the compressed queries and keys are part of latent attention.
            "qk_layernorm": True,
            **sinks,
        }
    return {
        "num_attention_heads": attention.num_heads,
        "kv_channels": attention.head_dim,
        "num_query_groups": attention.num_kv_heads,
        "qk_layernorm": attention.qk_norm in (QkNorm.HEAD, QkNorm.FULL),
        **({"qk_l2_norm": True} if attention.qk_norm is QkNorm.UNWEIGHTED else {}),
        **sinks,
    }


def _window(model: ModelSpec) -> dict[str, Value]:
    window = model.attention.sliding_window
    if window is None or not any(model.windowed):
        return {}
    # The engine counts the tokens before the current one only.
    fields: dict[str, Value] = {"window_size": (window - 1, 0)}
    if not all(model.windowed):
        fields["window_attn_skip_freq"] = tuple(map(int, model.windowed))
    return fields


def _moe(moe: Moe, model: ModelSpec) -> dict[str, Value]:
    softmax = moe.scoring == "softmax"
    grouped = moe.groups_per_token < moe.num_groups
    kinds = tuple(int(kind is LayerKind.MOE) for kind in model.layers)
    return {
        "num_moe_experts": moe.num_experts,
        "moe_ffn_hidden_size": moe.expert_ffn_size,
        "moe_router_topk": moe.top_k,
        "moe_router_score_function": moe.scoring,
        # Top-1 after normalisation is always one; the engine needs the raw probability instead.
        "moe_router_pre_softmax": softmax and (not moe.normalise_top_k or moe.top_k == 1),
        "moe_router_enable_expert_bias": moe.score_correction_bias,
        "moe_router_num_groups": moe.num_groups if grouped else None,
        "moe_router_group_topk": moe.groups_per_token if grouped else None,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_size or None,
        "moe_shared_expert_gate": bool(moe.shared_ffn_size) and moe.shared_expert_gate,
        **({"moe_latent_size": moe.latent_size} if moe.latent_size else {}),
        "moe_grouped_gemm": True,
        "moe_layer_freq": 1 if all(kinds) or is_hybrid(model) else kinds,
    }


def _stages(model: ModelSpec, decision: TrainDecision, *, core: Core) -> dict[str, Value]:
    """Return how layers are cut into stages; the pattern of a hybrid says it where it can."""
    virtual = decision.virtual_pipeline_model_parallel_size
    if not is_hybrid(model):
        return {
            "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
            "pipeline_model_parallel_layout": _layout(decision),
        }
    letters = pattern(model, decision, has_stages=core is not Core.V0_16)
    return {
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        HYBRID_PATTERN[core]: letters,
    }


def _layout(decision: TrainDecision) -> str | None:
    """Return Megatron's layout, e.g. `Et*3|t*4|t*4|t*3mL`: embedding, layers, MTP, loss by stage.

    Equal stages need none; the engine can place MTP layers on a stage of their own only with a
    layout.
    """
    layout = decision.pipeline_layout
    if decision.pipeline_model_parallel_size == 1 or len(set(layout)) == 1:
        return None
    stages = [_repeat("t", count) for count in layout]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}{_repeat('m', decision.mtp_num_layers)}L"
    return "|".join(stages)


def _repeat(letter: str, count: int) -> str:
    return f"{letter}*{count}" if count > 1 else letter * count


def _recompute(model: ModelSpec, decision: TrainDecision) -> dict[str, Value]:
    level, chunks = global_recompute(model, decision), global_chunks(model, decision)
    if level is None or chunks is None:
        raise ValueError("recompute and chunks are global in Megatron, but the stages differ")
    fields: dict[str, Value] = {
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
    }
    if level is Recompute.FULL:
        some = decision.recompute_num_layers
        fields |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform" if some is None else "block",
            "recompute_num_layers": 1 if some is None else some,
        }
    elif level is Recompute.SELECTIVE:
        fields |= {
            "recompute_granularity": "selective",
            "recompute_modules": selective_modules(decision),
        }
    if chunks > 1:
        fields["mlp_chunks_for_training"] = chunks
    return fields


def _offload(model: ModelSpec, decision: TrainDecision) -> dict[str, Value]:
    fields: dict[str, Value] = {"fine_grained_activation_offloading": decision.activation_offload}
    if not decision.activation_offload:
        return fields
    recomputed: set[str] = set()
    if global_recompute(model, decision) is Recompute.SELECTIVE:
        recomputed.update(selective_modules(decision))
    if "moe" in recomputed or not model.num_moe_layers:
        recomputed |= {"moe", "moe_act"}
    kept = (name for name, module in _OFFLOADED.items() if module not in recomputed)
    return fields | {"offload_modules": tuple(kept)}


def _graph(model: ModelSpec, decision: TrainDecision, *, core: Core) -> dict[str, Value]:
    scope = "cuda_graph_modules" if core is Core.V0_18 else "cuda_graph_scope"
    if decision.cuda_graph == "none":
        return {"cuda_graph_impl": "none"}
    if decision.cuda_graph == "partial":
        experts = ("moe_router", "moe_preprocess") if model.num_moe_layers else ()
        # The overlap interleaves the feed-forward networks of two micro-batches.
        dense = LayerKind.DENSE in model.layers and not decision.a2a_overlap
        mamba = ("mamba",) if ModelFeature.MAMBA2 in features(model) else ()
        modules = ("attn", *mamba, *(("mlp",) if dense else ()), *experts)
        return {"cuda_graph_impl": "transformer_engine", scope: modules}
    if core is not Core.V0_18:
        return {"cuda_graph_impl": "local", scope: ("full_iteration",)}
    padded = _PADDED_EXPERTS if model.num_moe_layers else {}
    return {"cuda_graph_impl": "full_iteration", **padded}
