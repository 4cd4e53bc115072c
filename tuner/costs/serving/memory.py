"""Bytes of weights on a device, and how many tokens the cache holds beside them.

    tokens = c (r M - weights - reserve) / bytes per token

The reserve of 4 GB holds activations, CUDA graphs and communication buffers. vLLM and SGLang are
given a share r of the memory (c = 1), TensorRT-LLM a share c of what is free once weights are
loaded (r = 1); both are what public recipes set. Where that leaves no room for `least` tokens, a
launch that runs at all was given more: 0.95 of the memory and half the reserve. Cached heads are
split over tensor ranks until there is one each; compressed keys are whole on every rank.
"""

from typing import Final

from tuner.costs.serving.decoder import BYTES, Attention, AttentionKind, Decoder, Formats
from tuner.costs.serving.engine import Degrees, EngineTraits

RESERVE_BYTES: Final = 4.0e9
FULL_RATIO: Final = 0.95
"""The most that recipes give an engine (InferenceX, `--mem-fraction-static 0.95`)."""


def weight_bytes(decoder: Decoder, formats: Formats, degrees: Degrees) -> float:
    """Of one device."""
    ranks, hidden = degrees.attention_tensor, decoder.hidden
    total = 2.0 * decoder.vocab * hidden * BYTES[formats.head] / ranks
    for group in decoder.layers:
        layer = _attention_bytes(group.attention, hidden, formats, ranks)
        if group.dense_ffn:
            layer += 3.0 * hidden * group.dense_ffn * BYTES[formats.ffn] / ranks
        elif decoder.experts is not None:
            own = decoder.experts
            shards = degrees.moe_tensor * degrees.expert
            layer += 3.0 * hidden * own.num * own.ffn * BYTES[formats.experts] / shards
            layer += 3.0 * hidden * own.shared_ffn * BYTES[formats.ffn] / ranks
        total += group.count * layer
    return total / degrees.pipeline


def _attention_bytes(own: Attention, hidden: int, formats: Formats, ranks: int) -> float:
    inner, outer = BYTES[formats.attention], BYTES[formats.output]
    if own.kind in (AttentionKind.LATENT, AttentionKind.SPARSE_LATENT):
        down = hidden * (own.query_rank + own.kv_rank + own.rope_dim)
        nope = own.head_dim - own.rope_dim
        up = own.heads * ((own.query_rank or hidden) * own.head_dim)
        up += own.heads * own.kv_rank * (nope + own.value_dim)
        return (down + up / ranks) * inner + own.heads * own.value_dim * hidden * outer / ranks
    queries = own.heads * (2 if own.has_gate else 1)
    keys = 2 * max(own.kv_heads / ranks, 1.0)
    width = queries / ranks + keys
    return own.head_dim * hidden * (width * inner + own.heads / ranks * outer)


def kv_bytes_per_token(decoder: Decoder, formats: Formats, degrees: Degrees) -> float:
    """Of one token on one device."""
    width = 1.0 if formats.kv == "fp8" else 2.0
    total = 0.0
    for group in decoder.layers:
        own = group.attention
        share = 1.0
        if own.kind is AttentionKind.GROUPED:
            share = max(own.kv_heads / degrees.attention_tensor, 1.0) / own.kv_heads
        total += group.count * own.kv_elements * share * width
    return total / degrees.pipeline


def kv_tokens(
    decoder: Decoder,
    formats: Formats,
    degrees: Degrees,
    *,
    traits: EngineTraits,
    memory_bytes: float,
    least: float = 0.0,
) -> float:
    """Tokens that one attention-data rank can hold; not above 0 where the weights do not fit."""
    weights = weight_bytes(decoder, formats, degrees)
    each = max(kv_bytes_per_token(decoder, formats, degrees), 1e-9)
    usual = traits.cache_ratio * (traits.memory_ratio * memory_bytes - RESERVE_BYTES - weights)
    if usual / each >= least:
        return usual / each
    return max(usual, FULL_RATIO * memory_bytes - 0.5 * RESERVE_BYTES - weights) / each
