"""Readers of hybrids: layers with attention between layers with linear attention.

The classes of transformers 5.24 build linear attention in chunks of 64 (gated delta rule, KDA),
which no config states; Mamba-2 states its own.
"""

from typing import Final

from profilers.steps.config import LayerKind
from tuner.spec.files import shown_value
from tuner.spec.huggingface import parts
from tuner.spec.huggingface.fields import ConfigFields
from tuner.spec.linear_attention import LinearAttention, LinearName
from tuner.spec.model import Mixer, ModelSpec, Moe, QkNorm

DELTA_CHUNK: Final = 64
"""Tokens of a chunk of the delta rules' kernels (flash-linear-attention and transformers)."""

Block = tuple[Mixer, LayerKind]
"""A layer: its mixer and its network."""

_NEMOTRON_LETTERS: Final = {
    "M": (Mixer.LINEAR, LayerKind.NONE),
    "*": (Mixer.ATTENTION, LayerKind.NONE),
    "-": (Mixer.NONE, LayerKind.DENSE),
    "E": (Mixer.NONE, LayerKind.MOE),
}
_NEMOTRON_NAMES: Final = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}


def nemotron_h(fields: ConfigFields) -> ModelSpec:
    """Read Nemotron-H and Nemotron-3: each layer is a mixer or a network alone."""
    blocks = _nemotron_blocks(fields)
    mixers, layers = zip(*blocks, strict=True)
    mlp_bias = fields.flag("mlp_bias", default=False)
    head_dim = "head_dim" if fields.has("head_dim") else "attention_head_dim"
    return parts.build_model(
        fields,
        # The class has no biases there, whatever `attention_bias` says.
        attention=parts.gqa(fields, head_dim_is_required=True, head_dim=head_dim),
        linear=_mamba2(fields) if Mixer.LINEAR in mixers else None,
        layers=layers,
        mixers=mixers,
        dense_ffn_size=parts.dense_ffn_size(fields, layers),
        ffn_is_gated=False,
        ffn_bias=mlp_bias,
        moe=_nemotron_moe(fields) if LayerKind.MOE in layers else None,
        mtp_num_layers=fields.size("num_nextn_predict_layers", default=0, least=0, largest=64),
        norm_epsilon="layer_norm_epsilon",
    )


def _nemotron_blocks(fields: ConfigFields) -> tuple[Block, ...]:
    """Read the pattern of layers: a list of names, a text of letters, or both alike."""
    stated = [name for name in ("layers_block_type", "hybrid_override_pattern") if fields.has(name)]
    patterns = [_nemotron_letters(fields, name) for name in stated or ["hybrid_override_pattern"]]
    if patterns[0] != patterns[-1]:
        raise fields.refusal(
            "hybrid_override_pattern",
            "its layers are not those of layers_block_type; leave one of the two out",
        )
    return tuple(_NEMOTRON_LETTERS[letter] for letter in patterns[0])


def _nemotron_letters(fields: ConfigFields, name: str) -> list[str]:
    """Read one of the patterns."""
    if name == "layers_block_type":
        kinds = fields.typed_list(name, str) or []
        letters = [_NEMOTRON_NAMES.get(kind, "") for kind in kinds]
        known = ", ".join(_NEMOTRON_NAMES)
    else:
        kinds = list(fields.text(name, default=""))
        letters = [kind if kind in _NEMOTRON_LETTERS else "" for kind in kinds]
        known = ", ".join(_NEMOTRON_LETTERS)
    if not kinds:
        raise fields.refusal(name, "missing, and the architecture needs it")
    if "" in letters:
        place = letters.index("")
        raise fields.refusal(
            f"{name}[{place}]", f"{shown_value(kinds[place])} is not a kind of layer: {known}"
        )
    if fields.has("num_hidden_layers") and parts.num_layers(fields) != len(kinds):
        raise fields.refusal(
            name, f"{len(kinds)} layers for num_hidden_layers {parts.num_layers(fields)}"
        )
    return letters


def _mamba2(fields: ConfigFields) -> LinearAttention:
    heads, groups = fields.size("mamba_num_heads"), fields.size("n_groups")
    if heads % groups:
        raise fields.refusal("n_groups", f"{groups} does not divide mamba_num_heads {heads}")
    return LinearAttention(
        kind=LinearName.MAMBA2,
        num_key_heads=groups,
        num_value_heads=heads,
        key_head_dim=fields.size("ssm_state_size"),
        value_head_dim=fields.size("mamba_head_dim"),
        conv_kernel=fields.size("conv_kernel"),
        chunk_size=fields.size("chunk_size", default=128),
        conv_bias=fields.flag("use_conv_bias", default=True),
        projection_bias=fields.flag("use_bias", default=False),
    )


def _nemotron_moe(fields: ConfigFields) -> Moe:
    return parts.sigmoid_moe(
        fields,
        shared_ffn_size=fields.size("moe_shared_expert_intermediate_size"),
        latent_size=fields.optional_size("moe_latent_size") or 0,
    )


def qwen3_next(fields: ConfigFields) -> ModelSpec:
    """Read Qwen3-Next: the gated delta rule, and attention with an output gate in every fourth.

    Published configs leave out the one prediction layer of the checkpoint (vLLM 0.33.0,
    qwen3_next_mtp.py; SGLang, models/qwen3_next_mtp.py; Megatron-Bridge, qwen3_next_bridge.py).
    """
    return _gated_delta_model(
        fields,
        layers=parts.sparse_steps(fields),
        mtp_num_layers=fields.size("num_nextn_predict_layers", default=1, least=0, largest=64),
    )


def qwen3_5_moe(fields: ConfigFields) -> ModelSpec:
    """Read the language model of Qwen3.5, whose layers all have experts."""
    text = fields.text_config()
    return _gated_delta_model(
        text,
        layers=(LayerKind.MOE,) * parts.num_layers(text),
        mtp_num_layers=text.size("mtp_num_hidden_layers", default=0, least=0, largest=64),
    )


def qwen3_5(fields: ConfigFields) -> ModelSpec:
    """Read the language model of a dense Qwen3.5."""
    text = fields.text_config()
    return _gated_delta_model(
        text,
        layers=(LayerKind.DENSE,) * parts.num_layers(text),
        mtp_num_layers=text.size("mtp_num_hidden_layers", default=0, least=0, largest=64),
    )


def _gated_delta_model(
    fields: ConfigFields, *, layers: tuple[LayerKind, ...], mtp_num_layers: int
) -> ModelSpec:
    mixers = _full_and_linear(fields, len(layers))
    bias = fields.flag("attention_bias", default=False)
    return parts.build_model(
        fields,
        attention=parts.gqa(
            fields,
            head_dim_is_required=True,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=QkNorm.HEAD,
            has_output_gate=True,
        ),
        linear=_gated_delta(fields) if Mixer.LINEAR in mixers else None,
        layers=layers,
        mixers=mixers,
        dense_ffn_size=parts.dense_ffn_size(fields, layers),
        moe=parts.moe(
            fields,
            experts="num_experts",
            width="moe_intermediate_size",
            normalise=fields.flag("norm_topk_prob", default=True),
            shared_ffn_size=fields.size("shared_expert_intermediate_size"),
            shared_expert_gate=True,
        )
        if LayerKind.MOE in layers
        else None,
        mtp_num_layers=mtp_num_layers,
    )


def _full_and_linear(fields: ConfigFields, num_layers: int) -> tuple[Mixer, ...]:
    kinds = parts.layer_list(fields, "layer_types", str, count=num_layers)
    if kinds is None:
        step = fields.size("full_attention_interval", default=4)
        return tuple(Mixer.LINEAR if (i + 1) % step else Mixer.ATTENTION for i in range(num_layers))
    named = {"full_attention": Mixer.ATTENTION, "linear_attention": Mixer.LINEAR}
    for position, kind in enumerate(kinds):
        if kind not in named:
            raise fields.refusal(
                f"layer_types[{position}]",
                f"{shown_value(kind)} is neither 'full_attention' nor 'linear_attention'",
            )
    return tuple(named[kind] for kind in kinds)


def _gated_delta(fields: ConfigFields) -> LinearAttention:
    keys, values = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    if values % keys:
        raise fields.refusal(
            "linear_num_key_heads", f"{keys} does not divide linear_num_value_heads {values}"
        )
    return LinearAttention(
        kind=LinearName.GATED_DELTA,
        num_key_heads=keys,
        num_value_heads=values,
        key_head_dim=fields.size("linear_key_head_dim"),
        value_head_dim=fields.size("linear_value_head_dim"),
        conv_kernel=fields.size("linear_conv_kernel_dim", default=4),
        chunk_size=DELTA_CHUNK,
    )


def kimi_linear(fields: ConfigFields) -> ModelSpec:
    """Read Kimi Linear: KDA, and MLA without rotary embedding in every fourth layer."""
    layers = parts.leading_dense(fields)
    linear_fields = fields.nested("linear_attn_config")
    mixers = _kimi_mixers(linear_fields, len(layers))
    heads, width = linear_fields.size("num_heads"), linear_fields.size("head_dim")
    return parts.build_model(
        fields,
        attention=parts.mla(fields),
        linear=LinearAttention(
            kind=LinearName.KDA,
            num_key_heads=heads,
            num_value_heads=heads,
            key_head_dim=width,
            value_head_dim=width,
            conv_kernel=linear_fields.size("short_conv_kernel_size", default=4),
            chunk_size=DELTA_CHUNK,
        )
        if Mixer.LINEAR in mixers
        else None,
        layers=layers,
        mixers=mixers,
        dense_ffn_size=parts.dense_ffn_size(fields, layers),
        moe=parts.moe(
            fields,
            experts="num_experts",
            width="moe_intermediate_size",
            chosen="num_experts_per_token",
            normalise=fields.flag("moe_renormalize", default=True),
            scoring="sigmoid",
            score_correction_bias=True,
            shared_ffn_size=fields.size("num_shared_experts", default=0, least=0)
            * fields.size("moe_intermediate_size"),
            num_groups=fields.size("num_expert_group", default=1),
            groups_per_token=fields.size("topk_group", default=1),
        ),
        mtp_num_layers=fields.size("num_nextn_predict_layers", default=0, least=0, largest=64),
        max_position="max_position_embeddings"
        if fields.has("max_position_embeddings")
        else "model_max_length",
    )


def _kimi_mixers(fields: ConfigFields, num_layers: int) -> tuple[Mixer, ...]:
    """Read the two lists of layers, counted from 1; together they are all layers, each once."""
    full = fields.typed_list("full_attn_layers", int) or []
    linear = fields.typed_list("kda_layers", int) or []
    if sorted(full + linear) != list(range(1, num_layers + 1)):
        raise fields.refusal(
            "full_attn_layers",
            f"with kda_layers not each of the {num_layers} layers once, counted from 1",
        )
    return tuple(Mixer.ATTENTION if i + 1 in full else Mixer.LINEAR for i in range(num_layers))
