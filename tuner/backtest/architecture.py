"""Reads the architecture of a published run, `arch_json` or its model's config, as a `ModelShape`.

Missing values follow the family: without a gate (GPT, MPT) the LM head shares the embedding's
weights, the FFN is 4 * hidden wide and the vocabulary GPT-2's, padded to 51,200;
with experts and no count of leading dense layers there are none.

Where `arch_json` has no dimensions, the model's shipped config is taken (known_models.py): hybrids
with state-space layers, which `arch_json` cannot say, are read from it alone.
"""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from tuner.backtest.known_models import find_model
from tuner.backtest.rows import Architecture, Row
from tuner.config.shapes import ModelShape
from tuner.costs.train.columns_of import shape_of_model
from tuner.spec.model import MOST_TOP_K

GPT_VOCAB: Final = 51_200.0
BESIDE_CONFIG: Final = ("mtp_layers", "seq")
"""Keys that a shipped config does not answer."""
LARGEST: Final = 1e7
"""Largest value of any dimension; more is a typing error."""
GPT_OSS_WINDOW: Final = 128.0
"""Tokens; gpt-oss model card, 2025: every second layer looks back on 128 tokens, with sinks."""


def parse_shape(row: Row) -> ModelShape:
    """Return the model of a row.

    Raises:
        ValueError: the architecture is absent, incomplete or impossible.
    """
    read = row.architecture
    if set(read) <= set(BESIDE_CONFIG):
        model = find_model(row.text("model"))
        if model is None:
            raise ValueError(f"no arch_json, and {row.text('model') or 'the model'} is not known")
        mtp_layers = _count(read, "mtp_layers", default=0.0)
        shape = shape_of_model(model, mtp_layers=round(mtp_layers))
        return replace(shape, mtp_is_repeated=float(mtp_layers > 1.0))
    hidden, heads = _count(read, "hidden"), _count(read, "heads")
    layers = _count(read, "layers")
    experts = _count(read, "experts", default=0.0)
    is_gated = _flag(read, "glu", default=True)
    is_mla = read.get("attn") == "mla"
    head_dim = _count(read, "head_dim", default=0.0)
    rope = _count(read, "qk_rope_dim", default=0.0) if is_mla else 0.0
    if is_mla:
        head_dim = _count(read, "qk_head_dim") + rope
    elif not head_dim:
        if hidden % heads:
            raise ValueError(f"arch_json: {heads:g} heads do not divide hidden {hidden:g}")
        head_dim = hidden / heads
    dense = min(_count(read, "dense_layers", default=0.0), layers) if experts else layers
    name = re.sub(r"[^a-z0-9]", "", row.text("model").lower())
    is_gpt_oss = name.startswith("gptoss")
    shape = ModelShape(
        hidden=hidden,
        heads=heads,
        kv_heads=_count(read, "kv_heads", default=heads),
        head_dim=head_dim,
        value_dim=_count(read, "v_head_dim", default=head_dim) if is_mla else head_dim,
        is_mla=float(is_mla),
        q_lora_rank=_count(read, "q_lora_rank", default=0.0) if is_mla else 0.0,
        kv_lora_rank=_count(read, "kv_lora_rank") if is_mla else 0.0,
        rope_dim=rope,
        has_sinks=float(is_gpt_oss),
        has_qk_norm=float(_flag(read, "qk_norm", default=name.startswith("qwen3"))),
        window=GPT_OSS_WINDOW if is_gpt_oss else 0.0,
        windowed_ratio=0.5 if is_gpt_oss else 0.0,
        dense_ffn=_count(read, "ffn", default=0.0 if experts else 4.0 * hidden),
        is_gated=float(is_gated),
        vocab=_count(read, "vocab", default=GPT_VOCAB),
        is_tied=float(_flag(read, "tied", default=not is_gated)),
        dense_layers=dense,
        moe_layers=layers - dense,
        experts=experts,
        top_k=_count(read, "topk") if experts else 0.0,
        moe_ffn=_count(read, "moe_ffn") if experts else 0.0,
        shared_ffn=_count(read, "shared_ffn", default=0.0),
        mtp_layers=_count(read, "mtp_layers", default=0.0),
    )
    _check(shape)
    return shape


def _check(shape: ModelShape) -> None:
    if shape.experts and shape.top_k > shape.experts:
        raise ValueError(f"arch_json: topk {shape.top_k:g} exceeds {shape.experts:g} experts")
    if shape.top_k > MOST_TOP_K:
        raise ValueError(f"arch_json: topk {shape.top_k:g} exceeds {MOST_TOP_K}")
    if shape.heads % shape.kv_heads:
        raise ValueError(
            f"arch_json: {shape.kv_heads:g} kv_heads do not divide {shape.heads:g} heads"
        )
    if shape.dense_layers and not shape.dense_ffn:
        raise ValueError("arch_json: ffn is missing, and some layers have no experts")


def _count(read: Architecture, key: str, *, default: float | None = None) -> float:
    value = read.get(key)
    if value is None:
        if default is None:
            raise ValueError(f"arch_json: {key} is missing")
        return default
    # Integers of JSON may be longer than any float.
    is_number = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_number:
        raise ValueError(f"arch_json: {key} is not a finite number")
    is_optional = default == 0.0 or key in ("shared_ffn", "dense_layers", "q_lora_rank")
    if value != math.floor(value) or not (0.0 if is_optional else 1.0) <= value <= LARGEST:
        raise ValueError(f"arch_json: {key} {value:g} is not a whole number that can be")
    return float(value)


def _flag(read: Mapping[str, object], key: str, *, default: bool) -> bool:
    value = read.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"arch_json: {key} is neither true nor false")  # noqa: TRY004 bad input
    return value
