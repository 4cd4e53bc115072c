"""One reader per architecture, from the fields of its `config.json` to a `ModelSpec`.

Hybrids of attention and linear attention are in hybrids.py.

The readers follow the model classes of transformers 5.23: a field that only some classes use is
read only for those, and an absent field takes the class's default where published configs omit it.
Widths and counts have no default: a config without them is refused.

Fields that affect neither parameters, FLOPs nor bytes (dropout, initialisation, rotary scaling,
token ids, quantization of the checkpoint) are ignored.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from profilers.steps.config import LayerKind
from tuner.spec.files import shown_value
from tuner.spec.huggingface import hybrids, parts
from tuner.spec.huggingface.fields import ConfigFields
from tuner.spec.model import LONGEST_POSITION, MOST_LAYERS, Attention, ModelSpec, QkNorm


def _mixtral(fields: ConfigFields) -> ModelSpec:
    num_layers = parts.num_layers(fields)
    window = fields.optional_size("sliding_window", largest=LONGEST_POSITION)
    return parts.build_model(
        fields,
        attention=parts.gqa(fields, sliding_window=window),
        layers=(LayerKind.MOE,) * num_layers,
        windowed=(window is not None,) * num_layers,
        moe=parts.moe(
            fields, experts="num_local_experts", width="intermediate_size", normalise=True
        ),
        default_rope_theta=1_000_000.0,
    )


def _qwen3_moe(fields: ConfigFields) -> ModelSpec:
    layers = parts.sparse_steps(fields)
    window = parts.used_window(fields)
    bias = fields.flag("attention_bias", default=False)
    return parts.build_model(
        fields,
        attention=parts.gqa(
            fields,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=QkNorm.HEAD,
            sliding_window=window,
        ),
        layers=layers,
        windowed=(window is not None,) * len(layers),
        dense_ffn_size=parts.dense_ffn_size(fields, layers),
        moe=parts.moe(
            fields,
            experts="num_experts",
            width="moe_intermediate_size",
            normalise=fields.flag("norm_topk_prob", default=False),
        ),
    )


def _qwen2_moe(fields: ConfigFields) -> ModelSpec:
    layers = parts.sparse_steps(fields)
    window = parts.used_window(fields)
    last = fields.size("max_window_layers", default=28, least=0)
    alternating = [window is not None and i % 2 == 0 and i < last for i in range(len(layers))]
    return parts.build_model(
        fields,
        attention=parts.gqa(
            fields,
            qkv_bias=fields.flag("qkv_bias", default=True),
            sliding_window=window,
        ),
        layers=layers,
        windowed=parts.windowed(fields, default=alternating, window=window),
        dense_ffn_size=parts.dense_ffn_size(fields, layers),
        moe=parts.moe(
            fields,
            experts="num_experts",
            width="moe_intermediate_size",
            normalise=fields.flag("norm_topk_prob", default=False),
            shared_ffn_size=fields.size("shared_expert_intermediate_size"),
            shared_expert_gate=True,
        ),
    )


def _olmoe(fields: ConfigFields) -> ModelSpec:
    bias = fields.flag("attention_bias", default=False)
    attention = parts.gqa(
        fields,
        kv_heads_default_to_heads=True,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=QkNorm.FULL,
    )
    if attention.head_dim * attention.num_heads != fields.size("hidden_size"):
        raise fields.refusal(
            "head_dim", f"{attention.head_dim} is not hidden_size / num_attention_heads"
        )
    return parts.build_model(
        fields,
        attention=attention,
        layers=(LayerKind.MOE,) * parts.num_layers(fields),
        moe=parts.moe(
            fields,
            experts="num_experts",
            width="intermediate_size",
            normalise=fields.flag("norm_topk_prob", default=False),
        ),
    )


def _deepseek_v2(fields: ConfigFields) -> ModelSpec:
    layers = parts.leading_dense(fields)
    grouped = fields.text("topk_method", default="greedy") == "group_limited_greedy"
    limits = parts.groups(fields) if grouped else {}
    return parts.build_model(
        fields,
        attention=parts.mla(fields),
        layers=layers,
        dense_ffn_size=parts.dense_ffn_size(fields, layers),
        ffn_bias=fields.flag("mlp_bias", default=False),
        moe=parts.moe(
            fields,
            experts="n_routed_experts",
            width="moe_intermediate_size",
            normalise=fields.flag("norm_topk_prob", default=False),
            shared_ffn_size=parts.shared_ffn_size(fields),
            num_groups=limits.get("num_groups", 1),
            groups_per_token=limits.get("groups_per_token", 1),
        ),
        mtp_num_layers=fields.size("num_nextn_predict_layers", default=0, least=0, largest=64),
    )


def _deepseek_v3(fields: ConfigFields) -> ModelSpec:
    return _latent_moe(fields, attention=parts.mla(fields))


def _sparse_deepseek(fields: ConfigFields) -> ModelSpec:
    """Read DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with indexers, in some layers of GLM-5.2."""
    shared = parts.shared_indexers(fields, num_layers=parts.num_layers(fields))
    attention = parts.mla(fields, indexer=parts.indexer(fields))
    return _latent_moe(fields, attention=attention, shared_indexers=shared)


def _deepseek_v4(fields: ConfigFields) -> ModelSpec:
    """Read DeepSeek-V4: one key for all heads, compressors beside windows, residual streams."""
    total = parts.num_layers(fields)
    mtp_layers = fields.size("num_nextn_predict_layers", default=0, least=0, largest=64)
    ratios = parts.compress_ratios(fields, num_layers=total, mtp_layers=mtp_layers)
    # The class builds one, whatever the field says.
    parts.only(fields, "n_shared_experts", 1)
    return parts.build_model(
        fields,
        attention=parts.shared_kv(fields, ratios=ratios),
        layers=(LayerKind.MOE,) * total,
        windowed=(True,) * total,
        compress_ratios=ratios,
        residual_streams=fields.size("hc_mult"),
        moe=parts.sigmoid_moe(
            fields,
            scoring=parts.scoring(fields),
            num_hash_layers=min(total, fields.size("num_hash_layers", least=0)),
            shared_ffn_size=fields.size("moe_intermediate_size"),
            num_groups=1,
            groups_per_token=1,
        ),
        mtp_num_layers=mtp_layers,
    )


def _beside_tower(read: Callable[[ConfigFields], ModelSpec]) -> Callable[[ConfigFields], ModelSpec]:
    """Return the reader of a model that reads images, from that of its language model."""
    return lambda fields: read(fields.text_config())


def _latent_moe(
    fields: ConfigFields, *, attention: Attention, shared_indexers: tuple[bool, ...] = ()
) -> ModelSpec:
    layers = parts.leading_dense(fields)
    return parts.build_model(
        fields,
        attention=attention,
        layers=layers,
        shared_indexers=shared_indexers,
        dense_ffn_size=parts.dense_ffn_size(fields, layers),
        moe=parts.sigmoid_moe(fields),
        mtp_num_layers=fields.size("num_nextn_predict_layers", default=0, least=0, largest=64),
    )


def _glm4_moe(fields: ConfigFields) -> ModelSpec:
    layers = parts.leading_dense(fields)
    return parts.build_model(
        fields,
        attention=parts.gqa(
            fields,
            qkv_bias=fields.flag("attention_bias", default=False),
            qk_norm=QkNorm.HEAD if fields.flag("use_qk_norm", default=False) else QkNorm.NONE,
        ),
        layers=layers,
        dense_ffn_size=parts.dense_ffn_size(fields, layers),
        moe=parts.sigmoid_moe(fields),
        mtp_num_layers=fields.size("num_nextn_predict_layers", default=0, least=0, largest=64),
    )


def _gpt_oss(fields: ConfigFields) -> ModelSpec:
    num_layers = parts.num_layers(fields)
    window = fields.optional_size("sliding_window", largest=LONGEST_POSITION)
    bias = fields.flag("attention_bias", default=True)
    return parts.build_model(
        fields,
        attention=parts.gqa(
            fields,
            head_dim_is_required=True,
            qkv_bias=bias,
            output_bias=bias,
            has_sinks=True,
            sliding_window=window,
        ),
        layers=(LayerKind.MOE,) * num_layers,
        windowed=parts.windowed(
            fields, default=[i % 2 == 0 for i in range(num_layers)], window=window
        ),
        moe=parts.moe(
            fields,
            experts="num_local_experts",
            width="intermediate_size",
            normalise=True,
            router_bias=True,
            expert_bias=True,
        ),
        default_rope_theta=150_000.0,
    )


def _minimax_m2(fields: ConfigFields) -> ModelSpec:
    num_layers = parts.num_layers(fields)
    # Of MiniMax-Text-01 0 is lightning attention.
    only_full = "full attention in every layer, which alone is supported,"
    parts.check_layers(fields, "attn_type_list", (1,) * num_layers, by=only_full)
    return parts.build_model(
        fields,
        attention=parts.gqa(
            fields,
            qk_norm=QkNorm.FULL if fields.flag("use_qk_norm", default=True) else QkNorm.NONE,
        ),
        layers=(LayerKind.MOE,) * num_layers,
        moe=parts.moe(
            fields,
            experts="num_local_experts",
            width="intermediate_size",
            normalise=True,
            scoring="sigmoid",
            score_correction_bias=True,
        ),
    )


def _llama4(fields: ConfigFields) -> ModelSpec:
    """Read Llama-4's language model: layers with rotary embedding attend inside chunks."""
    text = fields.text_config() if "text_config" in fields.values else fields
    chunk = text.optional_size("attention_chunk_size", largest=LONGEST_POSITION)
    if "attention_chunk_size" not in text.values:
        chunk = 8192
    layers, windowed = _llama4_layers(text, has_chunks=chunk is not None)
    bias = text.flag("attention_bias", default=False)
    has_norm = text.flag("use_qk_norm", default=True)
    return parts.build_model(
        text,
        attention=parts.gqa(
            text,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=QkNorm.UNWEIGHTED if has_norm else QkNorm.NONE,
            sliding_window=chunk,
            window_is_chunk=True,
        ),
        layers=layers,
        windowed=windowed,
        dense_ffn_size=text.size("intermediate_size_mlp") if LayerKind.DENSE in layers else 0,
        moe=parts.moe(
            text,
            experts="num_local_experts",
            width="intermediate_size",
            normalise=False,
            scoring="sigmoid",
            shared_ffn_size=text.size("intermediate_size"),
        ),
        default_rope_theta=500_000.0,
    )


def _llama4_layers(
    text: ConfigFields, *, has_chunks: bool
) -> tuple[tuple[LayerKind, ...], tuple[bool, ...]]:
    """Read the networks of layers, and which attend inside chunks; lists of them must agree."""
    count = parts.num_layers(text)
    interval = text.size("no_rope_layer_interval", default=4)
    step = text.size("interleave_moe_layer_step", default=1)
    rotary = tuple(int((i + 1) % interval != 0) for i in range(count))
    # The class takes an empty list for none.
    if text.values.get("no_rope_layers") != []:
        by = f"no_rope_layer_interval {interval}"
        parts.check_layers(text, "no_rope_layers", rotary, by=by)
    windowed = tuple(has_chunks and bool(is_rotary) for is_rotary in rotary)
    names = tuple(
        "chunked_attention" if is_windowed else "full_attention" for is_windowed in windowed
    )
    by = f"no_rope_layer_interval {interval} with{'' if has_chunks else 'out'} attention_chunk_size"
    parts.check_layers(text, "layer_types", names, by=by)
    with_experts = list(range(step - 1, count, step))
    stated = text.typed_list("moe_layers", int)
    if stated is not None and sorted(stated) != with_experts:
        raise text.refusal(
            "moe_layers", f"not the layers that interleave_moe_layer_step {step} gives experts"
        )
    layers = tuple(LayerKind.MOE if i in with_experts else LayerKind.DENSE for i in range(count))
    return layers, windowed


def _longcat_flash(fields: ConfigFields) -> ModelSpec:
    """Read LongCat-Flash: each layer of its class is two here, with experts and without.

    Such a layer has two blocks of attention, each before a dense network, and experts that read
    what the first network reads and are added behind the second (arXiv:2509.01322). The first
    network counts as a shared expert, which costs the same. Published configs leave out the one
    prediction layer of the checkpoint, which is dense (vLLM 0.33.0, config/speculative.py and
    longcat_flash_mtp.py; SGLang 0.5.23, configs/longcat_flash.py).
    """
    width = fields.size("ffn_hidden_size")
    num_layers = fields.size("num_layers", largest=MOST_LAYERS // 2)
    # Transformers writes twice the number, vLLM reads the number itself.
    stated = fields.size("num_hidden_layers", default=num_layers)
    if stated not in (num_layers, 2 * num_layers):
        raise fields.refusal(
            "num_hidden_layers", f"{stated} is neither num_layers {num_layers} nor twice that"
        )
    kind = fields.text("zero_expert_type", default="identity")
    if kind != "identity":
        raise fields.refusal(
            "zero_expert_type", f"{shown_value(kind)} is not supported; only 'identity' is"
        )
    for name in ("index_topk", "ngram_vocab_size_ratio", "oe_vocab_size_ratio"):
        if fields.has(name):
            raise fields.refusal(name, "not supported of this architecture; only null is")
    return parts.build_model(
        fields,
        attention=parts.mla(fields),
        layers=(LayerKind.MOE, LayerKind.DENSE) * num_layers,
        dense_ffn_size=width,
        moe=parts.moe(
            fields,
            experts="n_routed_experts",
            width="expert_ffn_hidden_size",
            chosen="moe_topk",
            normalise=False,
            shared_ffn_size=width,
            router_bias=fields.flag("router_bias", default=False),
            score_correction_bias=True,
            zero_experts=fields.size("zero_expert_num", least=0),
            is_shortcut=True,
        ),
        default_rope_theta=10_000_000.0,
        mtp_num_layers=fields.size("num_nextn_predict_layers", default=1, least=0, largest=64),
    )


def _llama(fields: ConfigFields) -> ModelSpec:
    bias = fields.flag("attention_bias", default=False)
    return _dense(
        fields,
        attention=parts.gqa(
            fields, kv_heads_default_to_heads=True, qkv_bias=bias, output_bias=bias
        ),
        ffn_bias=fields.flag("mlp_bias", default=False),
    )


def _mistral(fields: ConfigFields) -> ModelSpec:
    window = fields.optional_size("sliding_window", largest=LONGEST_POSITION)
    if "sliding_window" not in fields.values:
        window = 4096
    return _dense(
        fields,
        attention=parts.gqa(fields, sliding_window=window),
        windowed=(window is not None,) * parts.num_layers(fields),
    )


def _qwen2(fields: ConfigFields) -> ModelSpec:
    window = parts.used_window(fields)
    return _dense(
        fields,
        attention=parts.gqa(fields, qkv_bias=True, sliding_window=window),
        windowed=parts.upper_windowed(fields, window=window),
    )


def _qwen3(fields: ConfigFields) -> ModelSpec:
    window = parts.used_window(fields)
    bias = fields.flag("attention_bias", default=False)
    return _dense(
        fields,
        attention=parts.gqa(
            fields,
            head_dim_is_required=True,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=QkNorm.HEAD,
            sliding_window=window,
        ),
        windowed=parts.upper_windowed(fields, window=window),
    )


def _dense(fields: ConfigFields, **more: Any) -> ModelSpec:
    return parts.build_model(
        fields,
        layers=(LayerKind.DENSE,) * parts.num_layers(fields),
        dense_ffn_size=fields.size("intermediate_size"),
        moe=None,
        **more,
    )


ARCHITECTURES: Final[Mapping[str, Callable[[ConfigFields], ModelSpec]]] = {
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "DeepseekV32ForCausalLM": _sparse_deepseek,
    "DeepseekV4ForCausalLM": _deepseek_v4,
    "Glm4MoeForCausalLM": _glm4_moe,
    "Glm4MoeLiteForCausalLM": _deepseek_v3,
    "Glm4vMoeForConditionalGeneration": _beside_tower(_glm4_moe),
    "GlmMoeDsaForCausalLM": _sparse_deepseek,
    "GptOssForCausalLM": _gpt_oss,
    "KimiK25ForConditionalGeneration": _beside_tower(_deepseek_v3),
    "KimiLinearForCausalLM": hybrids.kimi_linear,
    "Llama4ForCausalLM": _llama4,
    "Llama4ForConditionalGeneration": _llama4,
    "LlamaForCausalLM": _llama,
    "LongcatFlashForCausalLM": _longcat_flash,
    "MiniMaxM2ForCausalLM": _minimax_m2,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "NemotronHForCausalLM": hybrids.nemotron_h,
    "OlmoeForCausalLM": _olmoe,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "Qwen3NextForCausalLM": hybrids.qwen3_next,
    "Qwen3VLForConditionalGeneration": _beside_tower(_qwen3),
    "Qwen3VLMoeForConditionalGeneration": _beside_tower(_qwen3_moe),
    "Qwen3_5ForConditionalGeneration": hybrids.qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": hybrids.qwen3_5_moe,
}
"""Readers of `config.json` by the name in its `architectures`; Kimi-K2 is DeepseekV3ForCausalLM."""
