"""Parts of a config that architectures share: attention, experts, layer kinds, windows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from profilers.steps.config import LayerKind
from tuner.spec.files import shown_value
from tuner.spec.huggingface.fields import ConfigFields
from tuner.spec.model import (
    LARGEST_SIZE,
    LONGEST_POSITION,
    MOST_LAYERS,
    MOST_TOP_K,
    Attention,
    ModelSpec,
    Moe,
)
from tuner.spec.sparse_attention import Compressor, Indexer

CSA_RATIO: Final = 4
"""Tokens that one entry of compressed sparse attention stands for (DeepSeek-V4); it has an
indexer."""
HCA_RATIO: Final = 128
"""Tokens that one entry of heavily compressed attention stands for, which has no indexer
(transformers 5.24, configuration_deepseek_v4.py, `_COMPRESS_RATIO_TO_LAYER_TYPE`)."""
SCORINGS: Final = ("softmax", "sigmoid", "sqrtsoftplus")


def build_model(
    fields: ConfigFields,
    *,
    attention: Attention,
    layers: tuple[LayerKind, ...],
    moe: Moe | None,
    dense_ffn_size: int = 0,
    windowed: tuple[bool, ...] = (),
    default_rope_theta: float = 10_000.0,
    norm_epsilon: str = "rms_norm_eps",
    max_position: str = "max_position_embeddings",
    **more: Any,
) -> ModelSpec:
    """Add the fields that all architectures share.

    `norm_epsilon` and `max_position` are names of fields.
    """
    return ModelSpec(
        name=fields.name,
        architecture=fields.architecture,
        hidden_size=fields.size("hidden_size"),
        num_layers=len(layers),
        vocab_size=fields.size("vocab_size"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        norm_epsilon=fields.number(norm_epsilon, below=1.0),
        rope_theta=rope_theta(fields, default=default_rope_theta),
        rope_factor=rope_factor(fields),
        max_position=fields.size(max_position, largest=LONGEST_POSITION),
        attention=attention,
        dense_ffn_size=dense_ffn_size if LayerKind.DENSE in layers else 0,
        layers=layers,
        windowed=windowed or (False,) * len(layers),
        moe=moe if LayerKind.MOE in layers else None,
        **more,
    )


def only(fields: ConfigFields, name: str, value: int) -> None:
    """Refuse any other value of a field, which may be absent."""
    stated = fields.size(name, default=value)
    if stated != value:
        raise fields.refusal(name, f"{stated} is not supported; only {value} is")


def num_layers(fields: ConfigFields) -> int:
    """Read the number of layers, without multi-token prediction."""
    return fields.size("num_hidden_layers", largest=MOST_LAYERS)


def gqa(
    fields: ConfigFields,
    *,
    kv_heads_default_to_heads: bool = False,
    head_dim_is_required: bool = False,
    head_dim: str = "head_dim",
    **more: Any,
) -> Attention:
    """Read grouped-query attention; the width of a head defaults to hidden_size / num_heads.

    `head_dim` is the name of its field.
    """
    num_heads = fields.size("num_attention_heads")
    # In every class null means num_attention_heads; an absent field does only in some.
    kv_default: int | None = num_heads
    if "num_key_value_heads" not in fields.values and not kv_heads_default_to_heads:
        kv_default = None
    num_kv_heads = fields.size("num_key_value_heads", default=kv_default)
    if num_heads % num_kv_heads:
        raise fields.refusal(
            "num_key_value_heads",
            f"{num_kv_heads} does not divide num_attention_heads {num_heads}",
        )
    if not fields.has(head_dim) and not head_dim_is_required:
        hidden_size = fields.size("hidden_size")
        if hidden_size % num_heads:
            raise fields.refusal(
                "num_attention_heads",
                f"{num_heads} does not divide hidden_size {hidden_size}, and head_dim is absent",
            )
        width = hidden_size // num_heads
    else:
        width = fields.size(head_dim)
    return Attention(
        kind="gqa", num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=width, **more
    )


def mla(fields: ConfigFields, **more: Any) -> Attention:
    """Read multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", default=num_heads)
    if num_kv_heads != num_heads:
        raise fields.refusal(
            "num_key_value_heads",
            f"{num_kv_heads} differs from num_attention_heads {num_heads}; latent attention has"
            " one key and value per head",
        )
    nope, rope = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    bias = fields.flag("attention_bias", default=False)
    if "q_lora_rank" not in fields.values:
        raise fields.refusal("q_lora_rank", "missing; null means uncompressed queries")
    return Attention(
        kind="mla",
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=nope + rope,
        qkv_bias=bias,
        output_bias=bias,
        q_lora_rank=fields.optional_size("q_lora_rank"),
        kv_lora_rank=fields.size("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=fields.size("v_head_dim"),
        **more,
    )


def indexer(fields: ConfigFields) -> Indexer:
    """Read the indexer of DeepSeek sparse attention."""
    return Indexer(
        num_heads=fields.size("index_n_heads"),
        head_dim=fields.size("index_head_dim"),
        top_k=fields.size("index_topk", largest=LARGEST_SIZE),
    )


def shared_indexers(fields: ConfigFields, *, num_layers: int) -> tuple[bool, ...]:
    """Read which layers attend to the tokens that an indexer before them picked; empty: none.

    By `indexer_types`, else `index_topk_pattern` ("S" shares), else every `index_topk_freq`-th
    layer from `index_skip_topk_offset` - 1 on has an indexer (vLLM 0.32.0, models/deepseek_v2.py;
    SGLang 0.5.23, configs/model_config.py, `dsa_layer_skips_topk`; both take 2 for no offset).
    """
    names = ("full", "shared")
    types = fields.typed_list("indexer_types", str)
    if types is None and fields.has("index_topk_pattern"):
        names, types = ("F", "S"), list(fields.text("index_topk_pattern", default=""))
    if types is None:
        every = fields.size("index_topk_freq", default=1)
        first = fields.size("index_skip_topk_offset", default=2)
        types = [names[max(at - first + 1, 0) % every != 0] for at in range(num_layers)]
    name = "indexer_types" if fields.has("indexer_types") else "index_topk_pattern"
    if len(types) < num_layers:
        raise fields.refusal(name, f"{len(types)} entries for num_hidden_layers {num_layers}")
    for position, kind in enumerate(types):
        if kind not in names or (kind == names[1] and not position):
            rule = f"none of {', '.join(names)}" if position else f"not {names[0]}"
            raise fields.refusal(f"{name}[{position}]", f"{shown_value(kind)} is {rule}")
    shared = tuple(kind == names[1] for kind in types[:num_layers])
    return shared if any(shared) else ()


def shared_kv(fields: ConfigFields, *, ratios: tuple[int, ...]) -> Attention:
    """Read attention with one key, which is the value too, and the compressors of those ratios."""
    num_heads, groups = fields.size("num_attention_heads"), fields.size("o_groups")
    only(fields, "num_key_value_heads", 1)
    if num_heads % groups:
        raise fields.refusal(
            "o_groups", f"{groups} does not divide num_attention_heads {num_heads}"
        )
    width, rope = fields.size("head_dim"), fields.size("qk_rope_head_dim")
    if rope > width:
        raise fields.refusal("qk_rope_head_dim", f"{rope} exceeds head_dim {width}")
    compressors = {
        CSA_RATIO: lambda: Compressor(ratio=CSA_RATIO, indexer=indexer(fields)),
        HCA_RATIO: lambda: Compressor(ratio=HCA_RATIO),
    }
    return Attention(
        kind="shared_kv",
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=width,
        has_sinks=True,
        sliding_window=fields.size("sliding_window", largest=LONGEST_POSITION),
        q_lora_rank=fields.size("q_lora_rank"),
        qk_nope_head_dim=width - rope,
        qk_rope_head_dim=rope,
        output_groups=groups,
        output_rank=fields.size("o_lora_rank"),
        compressors=tuple(compressors[ratio]() for ratio in sorted({*ratios} - {0})),
    )


def compress_ratios(fields: ConfigFields, *, num_layers: int, mtp_layers: int) -> tuple[int, ...]:
    """Read the ratio of every layer's compressor; those of multi-token prediction may follow."""
    ratios = fields.typed_list("compress_ratios", int)
    if ratios is None:
        raise fields.refusal("compress_ratios", "missing, and the architecture needs it")
    if len(ratios) not in (num_layers, num_layers + mtp_layers):
        more = f" (+ num_nextn_predict_layers {mtp_layers})" if mtp_layers else ""
        raise fields.refusal(
            "compress_ratios", f"{len(ratios)} entries for num_hidden_layers {num_layers}{more}"
        )
    for position, ratio in enumerate(ratios):
        if ratio not in (0, CSA_RATIO, HCA_RATIO):
            raise fields.refusal(
                f"compress_ratios[{position}]", f"{shown_value(ratio)} is none of 0, 4, 128"
            )
    for position, ratio in enumerate(ratios[num_layers:], num_layers):
        if ratio:
            raise fields.refusal(
                f"compress_ratios[{position}]",
                f"{ratio} of a multi-token-prediction layer is not supported; only 0 is",
            )
    return tuple(ratios[:num_layers])


def scoring(fields: ConfigFields) -> str:
    """Read how the router scores experts."""
    name = fields.text("scoring_func", default="sqrtsoftplus")
    if name not in SCORINGS:
        raise fields.refusal(
            "scoring_func", f"{shown_value(name)} is none of {', '.join(SCORINGS)}"
        )
    return name


def sigmoid_moe(fields: ConfigFields, **more: Any) -> Moe:
    """Read the experts of DeepSeek-V3's router: sigmoid scores, corrected by a bias.

    `more` replaces what differs.
    """
    usual: dict[str, Any] = {"scoring": "sigmoid", "shared_ffn_size": shared_ffn_size(fields)}
    return moe(
        fields,
        experts="n_routed_experts",
        width="moe_intermediate_size",
        normalise=fields.flag("norm_topk_prob", default=True),
        score_correction_bias=True,
        **(usual | groups(fields) | more),
    )


def moe(
    fields: ConfigFields,
    *,
    experts: str,
    width: str,
    normalise: bool,
    chosen: str = "num_experts_per_tok",
    **more: Any,
) -> Moe:
    """Read the routed experts.

    `experts`, `width` and `chosen` are the names of the architecture's fields.
    """
    num_experts, zero_experts = fields.size(experts), more.get("zero_experts", 0)
    top_k = fields.size(chosen, largest=MOST_TOP_K)
    if top_k > num_experts + zero_experts:
        zero = f" + {zero_experts} without weights" if zero_experts else ""
        raise fields.refusal(chosen, f"{top_k} exceeds {experts} {num_experts}{zero}")
    num_groups, groups_per_token = more.get("num_groups", 1), more.get("groups_per_token", 1)
    if num_experts % num_groups:
        raise fields.refusal("n_group", f"{num_groups} does not divide {experts} {num_experts}")
    if groups_per_token > num_groups:
        raise fields.refusal("topk_group", f"{groups_per_token} exceeds n_group {num_groups}")
    reachable = groups_per_token * (num_experts // num_groups) + zero_experts
    if top_k > reachable:
        raise fields.refusal(
            chosen, f"{top_k} exceeds the {reachable} experts of topk_group groups"
        )
    return Moe(
        num_experts=num_experts,
        top_k=top_k,
        expert_ffn_size=fields.size(width),
        normalise_top_k=normalise,
        **more,
    )


def groups(fields: ConfigFields) -> dict[str, int]:
    """Read the groups of group-limited routing."""
    return {
        "num_groups": fields.size("n_group", default=1),
        "groups_per_token": fields.size("topk_group", default=1),
    }


def shared_ffn_size(fields: ConfigFields) -> int:
    """Read the total width of DeepSeek-style shared experts."""
    return fields.size("n_shared_experts", default=0, least=0) * fields.size(
        "moe_intermediate_size"
    )


def leading_dense(fields: ConfigFields) -> tuple[LayerKind, ...]:
    """Read the layer kinds of a model whose first layers are dense and all others MoE."""
    only(fields, "moe_layer_freq", 1)
    total = num_layers(fields)
    dense = min(total, fields.size("first_k_dense_replace", least=0))
    return (LayerKind.DENSE,) * dense + (LayerKind.MOE,) * (total - dense)


def sparse_steps(fields: ConfigFields) -> tuple[LayerKind, ...]:
    """Read the layer kinds of a model in which every n-th layer is MoE, with exceptions."""
    step = fields.size("decoder_sparse_step", default=1)
    exceptions = fields.typed_list("mlp_only_layers", int) or []
    return tuple(
        LayerKind.MOE if (i + 1) % step == 0 and i not in exceptions else LayerKind.DENSE
        for i in range(num_layers(fields))
    )


def dense_ffn_size(fields: ConfigFields, layers: tuple[LayerKind, ...]) -> int:
    """Read the width of dense layers, which a model without them need not state."""
    return fields.size("intermediate_size") if LayerKind.DENSE in layers else 0


def used_window(fields: ConfigFields) -> int | None:
    """Read the sliding window, which applies only if `use_sliding_window` is set."""
    if not fields.flag("use_sliding_window", default=False):
        return None
    return fields.size("sliding_window", default=4096, largest=LONGEST_POSITION)


def upper_windowed(fields: ConfigFields, *, window: int | None) -> tuple[bool, ...]:
    """Return the sliding-window layers; unless stated, those from `max_window_layers` on."""
    first = fields.size("max_window_layers", default=28, least=0)
    return windowed(fields, default=[i >= first for i in range(num_layers(fields))], window=window)


def layer_list(fields: ConfigFields, name: str, kind: type, *, count: int) -> list[Any] | None:
    """Read a list with an entry for each of so many layers; None when absent or null."""
    entries = fields.typed_list(name, kind)
    if entries is not None and len(entries) != count:
        raise fields.refusal(name, f"{len(entries)} entries for num_hidden_layers {count}")
    return entries


def check_layers(fields: ConfigFields, name: str, derived: Sequence[Any], *, by: str) -> None:
    """Refuse a list of layers, if there is one, that is not what `by` makes of them."""
    stated = layer_list(fields, name, type(derived[0]), count=len(derived)) or ()
    for position, (entry, expected) in enumerate(zip(stated, derived, strict=False)):
        if entry != expected:
            raise fields.refusal(
                f"{name}[{position}]",
                f"{shown_value(entry)}, but {by} makes it {shown_value(expected)}",
            )


def windowed(fields: ConfigFields, *, default: list[bool], window: int | None) -> tuple[bool, ...]:
    """Return the sliding-window layers, from `layer_types` if stated."""
    kinds = layer_list(fields, "layer_types", str, count=len(default))
    if kinds is None:
        return tuple(window is not None and choice for choice in default)
    for position, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.refusal(
                f"layer_types[{position}]",
                f"{shown_value(kind)} is neither 'full_attention' nor 'sliding_attention'",
            )
    if "sliding_attention" in kinds and window is None:
        raise fields.refusal("sliding_window", "missing, and layer_types needs it")
    return tuple(kind == "sliding_attention" for kind in kinds)


def rope_factor(fields: ConfigFields) -> float:
    """Read what positions are scaled by; 1 where they are not, or not by one number."""
    nested = fields.values.get("rope_scaling") or fields.values.get("rope_parameters")
    factor = nested.get("factor") if isinstance(nested, dict) else None
    if not isinstance(factor, (int, float)) or isinstance(factor, bool):
        return 1.0
    return float(factor) if 1.0 <= factor <= LONGEST_POSITION else 1.0


def rope_theta(fields: ConfigFields, *, default: float) -> float:
    """Read the rotary base from the top level or, newer style, from `rope_parameters`."""
    nested = fields.values.get("rope_parameters")
    if not fields.has("rope_theta") and isinstance(nested, dict):
        inner = ConfigFields(values=nested, source=f"{fields.source}: rope_parameters")
        return inner.number("rope_theta", default=default)
    return fields.number("rope_theta", default=default)


_USUAL_TOWER: Final = (27, 1152, 4304)
_TOWERS: Final = {
    "Glm4vMoeForConditionalGeneration": (24, 1536, 10_944),
    "KimiK25ForConditionalGeneration": _USUAL_TOWER,
    "Llama4ForConditionalGeneration": (34, 1408, 5632),
    "Qwen3VLForConditionalGeneration": _USUAL_TOWER,
    "Qwen3VLMoeForConditionalGeneration": _USUAL_TOWER,
    "Qwen3_5ForConditionalGeneration": _USUAL_TOWER,
    "Qwen3_5MoeForConditionalGeneration": _USUAL_TOWER,
}
"""Layers, width and inner width of published vision towers, where `vision_config` leaves them
out."""
_TOWER_SIZES: Final = (
    ("depth", "num_hidden_layers", "vt_num_hidden_layers"),
    ("hidden_size", "vt_hidden_size"),
    ("intermediate_size", "vt_intermediate_size"),
)


def vision_elements(fields: ConfigFields, *, hidden: int) -> int:
    """Return the weights of a vision tower, 0 of a model that reads text alone.

    Model:   L (4 v v + 2 v f) + 4 v (4 v + h) of what joins four patches into a token of width h,
             as often again as Qwen3-VL takes patches from layers inside (`deepstack`); of GLM-4.5V
             L (4 v v + 3 v h) + 4 v h + h h + 3 h f, whose inner width is what joins them
    """
    usual = _TOWERS.get(fields.architecture)
    if usual is None:
        return 0
    has_own = fields.has("vision_config")
    tower = fields.nested("vision_config") if has_own else replace(fields, values={})
    layers, width, inner = (
        tower.size(next(filter(tower.has, names), names[0]), default=size)
        for names, size in zip(_TOWER_SIZES, usual, strict=True)
    )
    if fields.architecture.startswith("Glm4v"):
        blocks = layers * (4 * width**2 + 3 * width * hidden)
        return blocks + hidden * (4 * width + hidden + 3 * inner)
    joined = 1 + len(tower.typed_list("deepstack_visual_indexes", int) or ())
    blocks = layers * (4 * width**2 + 2 * width * inner)
    return blocks + joined * 4 * width * (4 * width + hidden)
