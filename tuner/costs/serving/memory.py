"""Bytes of weights on a device, and how many tokens the cache holds beside them.

    tokens = c (r M - weights - reserve) / bytes per token

The reserve holds activations, CUDA graphs and communication buffers (reserve.py), 4 GB where a
caller does not count them. vLLM and SGLang are
given a share r of the memory (c = 1), TensorRT-LLM a share c of what is free once weights are
loaded (r = 1); both are what public recipes set. Where that leaves no room for `least` tokens, a
launch that runs at all was given more: 0.95 of the memory and half the reserve. Cached heads are
split over tensor ranks until there is one each; compressed keys are whole on every rank. Layers
with a window keep its tokens of a request, layers with a state that of each request, so that what a
token costs depends on how long requests are. Of a pipeline the longest stage counts, with embedding
or head.
"""

import math
from typing import Final

from tuner.costs.serving.decoder import BYTES, Attention, AttentionKind, Decoder, Formats
from tuner.costs.serving.engine import Degrees, EngineTraits

RESERVE_BYTES: Final = 4.0e9
STATE_BYTES: Final = 4.0
"""Of an element of a state (`mamba_ssm_dtype: float32` in Qwen3-Next's config.json)."""
FULL_RATIO: Final = 0.95
"""The most that recipes give an engine (InferenceX, `--mem-fraction-static 0.95`)."""


def weight_bytes(decoder: Decoder, formats: Formats, degrees: Degrees) -> float:
    """Of one device."""
    ranks, hidden = degrees.attention_tensor, decoder.hidden
    ends = 2.0 * decoder.vocab * hidden * BYTES[formats.head] / ranks
    total = 0.0
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
    if degrees.pipeline == 1:
        return ends + total
    return 0.5 * ends + total * stage_ratio(decoder, degrees)


def stage_ratio(decoder: Decoder, degrees: Degrees) -> float:
    """Share of all layers that the longest stage holds."""
    return math.ceil(decoder.num_layers / degrees.pipeline) / decoder.num_layers


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


def kv_bytes_per_token(
    decoder: Decoder, formats: Formats, degrees: Degrees, *, request_tokens: float | None = None
) -> float:
    """Of one token on one device, as a share of a request of so many; None: every layer keeps all.

    Engines keep what they must of windows: vLLM's hybrid cache manager, SGLang's pool for windowed
    layers, TensorRT-LLM's `max_attention_window`.
    """
    width = 1.0 if formats.kv == "fp8" else 2.0
    total = 0.0
    for group in decoder.layers:
        own = group.attention
        share = 1.0
        if own.kind is AttentionKind.GROUPED:
            share = max(own.kv_heads / degrees.attention_tensor, 1.0) / own.kv_heads
        each = own.kv_elements * share * width
        if own.window and request_tokens is not None:
            each *= min(1.0, own.window / request_tokens)
        if own.kind is AttentionKind.GATED_DELTA and request_tokens is not None:
            each = _state_bytes(own, degrees) / request_tokens
        total += group.count * each
    return total * stage_ratio(decoder, degrees)


def _state_bytes(own: Attention, degrees: Degrees) -> float:
    """What a gated delta rule keeps of a request: a matrix per value head, in fp32."""
    return max(own.heads / degrees.attention_tensor, 1.0) * own.head_dim**2 * STATE_BYTES


def kv_tokens(
    decoder: Decoder,
    formats: Formats,
    degrees: Degrees,
    *,
    traits: EngineTraits,
    memory_bytes: float,
    least: float = 0.0,
    reserve_bytes: float = RESERVE_BYTES,
) -> float:
    """Tokens that one attention-data rank can hold; not above 0 where the weights do not fit."""
    return tokens_of(
        weights=weight_bytes(decoder, formats, degrees),
        each=kv_bytes_per_token(decoder, formats, degrees),
        traits=traits,
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
        least=least,
    )


def tokens_of(
    *,
    weights: float,
    each: float,
    traits: EngineTraits,
    memory_bytes: float,
    reserve_bytes: float,
    least: float = 0.0,
) -> float:
    """The rule of the module, for bytes of weights and of a token on one device."""
    each = max(each, 1e-9)
    free = traits.memory_ratio * memory_bytes - reserve_bytes - weights
    usual = traits.cache_ratio * free / each
    if usual >= least:
        return usual
    return max(usual, (FULL_RATIO * memory_bytes - 0.5 * reserve_bytes - weights) / each)
