"""Bytes of weights on a device, and of a token in its cache.

Cached heads are split over tensor ranks until there is one each; compressed keys are whole on every
rank. Layers with a window keep its tokens of a request, layers with a state that of each request,
so that what a token costs depends on how long requests are. Of a pipeline the longest stage counts,
with embedding or head. Engines keep a second copy of the up-projection of compressed keys in bf16,
for steps that decode (vLLM 0.33.0 `mla_attention.py`, `W_UK_T` and `W_UV`; SGLang 0.5.23
`deepseek_weight_loader.py`, `w_kc` and `w_vc`). Routers are bf16 and whole on every rank.

How many tokens an engine makes room for is its own rule (cache_capacity.py).
"""

import math
from typing import Final

from tuner.costs.serve.decoder import BYTES, AttentionKind, Decoder, DecoderAttention, Formats
from tuner.costs.serve.engine import InstanceDegrees

RESERVE_BYTES: Final = 4.0e9
DEVICE_RATIO: Final = 0.88
"""Of a device's memory, where no engine's rule is known (AFD)."""
STATE_BYTES: Final = 4.0
"""Of an element of a state (`mamba_ssm_dtype: float32` in Qwen3-Next's config.json)."""
FULL_RATIO: Final = 0.95
"""The most that recipes give an engine (InferenceX, `--mem-fraction-static 0.95`)."""


def weight_bytes(decoder: Decoder, formats: Formats, degrees: InstanceDegrees) -> float:
    """Of one device."""
    ranks, hidden = degrees.attention_tensor, decoder.hidden
    embedding_and_head = 2.0 * decoder.vocab * hidden * BYTES[formats.head] / ranks
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
            layer += hidden * own.num * BYTES["bf16"]
        total += group.count * layer
    if degrees.pipeline == 1:
        return embedding_and_head + total
    return 0.5 * embedding_and_head + total * stage_ratio(decoder, degrees)


def attention_weight_bytes(decoder: Decoder, formats: Formats, degrees: InstanceDegrees) -> float:
    """Of the attention of all layers on one device; without a pipeline."""
    ranks = degrees.attention_tensor
    return sum(
        group.count * _attention_bytes(group.attention, decoder.hidden, formats, ranks)
        for group in decoder.layers
    )


def stage_ratio(decoder: Decoder, degrees: InstanceDegrees) -> float:
    """Share of all layers that the longest stage holds."""
    return math.ceil(decoder.num_layers / degrees.pipeline) / decoder.num_layers


def _attention_bytes(own: DecoderAttention, hidden: int, formats: Formats, ranks: int) -> float:
    inner, outer = BYTES[formats.attention], BYTES[formats.output]
    if own.kind in (AttentionKind.LATENT, AttentionKind.SPARSE_LATENT):
        down = hidden * (own.query_rank + own.kv_rank + own.rope_dim)
        nope = own.head_dim - own.rope_dim
        up = own.heads * ((own.query_rank or hidden) * own.head_dim)
        absorbed = own.heads * own.kv_rank * (nope + own.value_dim)
        inner_bytes = (down + (up + absorbed) / ranks) * inner + absorbed / ranks * BYTES["bf16"]
        return inner_bytes + own.heads * own.value_dim * hidden * outer / ranks
    queries = own.heads * (2 if own.has_gate else 1)
    keys = 2 * max(own.kv_heads / ranks, 1.0)
    width = queries / ranks + keys
    return own.head_dim * hidden * (width * inner + own.heads / ranks * outer)


def kv_bytes_per_token(
    decoder: Decoder,
    formats: Formats,
    degrees: InstanceDegrees,
    *,
    request_tokens: float | None = None,
    window_pool_ratio: float | None = None,
) -> float:
    """Of one token on one device, as a share of a request of so many; None: every layer keeps all.

    Engines keep what they must of windows: vLLM's hybrid cache manager, TensorRT-LLM's
    `max_attention_window`. SGLang's pool of windowed layers has a stated share of the tokens of the
    other pool.
    """
    width = 1.0 if formats.kv == "fp8" else 2.0
    total = 0.0
    for group in decoder.layers:
        own = group.attention
        share = 1.0
        if own.kind is AttentionKind.GROUPED:
            share = max(own.kv_heads / degrees.attention_tensor, 1.0) / own.kv_heads
        each = own.kv_elements * share * width
        if own.window and window_pool_ratio is not None:
            each *= window_pool_ratio
        elif own.window and request_tokens is not None:
            each *= min(1.0, own.window / request_tokens)
        if own.kind is AttentionKind.GATED_DELTA and request_tokens is not None:
            each = _state_bytes(own, degrees) / request_tokens
        total += group.count * each
    return total * stage_ratio(decoder, degrees)


def _state_bytes(own: DecoderAttention, degrees: InstanceDegrees) -> float:
    """What a gated delta rule keeps of a request: a matrix per value head, in fp32."""
    return max(own.heads / degrees.attention_tensor, 1.0) * own.head_dim**2 * STATE_BYTES


def kv_tokens(
    decoder: Decoder, formats: Formats, degrees: InstanceDegrees, *, memory_bytes: float
) -> float:
    """Tokens that one device can hold where no engine's rule is known; not above 0 without room."""
    free = DEVICE_RATIO * memory_bytes - RESERVE_BYTES - weight_bytes(decoder, formats, degrees)
    return free / max(kv_bytes_per_token(decoder, formats, degrees), 1e-9)
