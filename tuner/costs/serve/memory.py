"""Bytes of weights on a device, and of a token and of a request in its cache.

Cached heads are split over tensor ranks until there is one each; compressed keys are whole on every
rank. Under decode context parallelism ranks that would keep equal keys share their positions.
Layers with a window keep its tokens of a request, so that what a token costs depends on how long
requests are; layers with linear attention keep a state of each request, however long it is, and
compressors their open entries. Of a pipeline the longest stage counts, with embedding or head; on
one stage a tied head is the embedding. Engines keep a second copy of the up-projection of
compressed keys in bf16, for steps that decode (vLLM 0.33.0 `mla_attention.py`, `W_UK_T` and
`W_UV`; SGLang 0.5.23 `deepseek_weight_loader.py`, `w_kc` and `w_vc`). Routers,
indexers, compressors and projections into an experts' latent width are whole on every rank; of
compressors all but the queries of their indexer are bf16 (vLLM 0.33.0, models/deepseek_v4/).
Norms, convolutions and biases are left out.

States, by the rule of the engine (`StateRule`):

    SGLang    so many slots of a running request, beside the pool of pages; --max-mamba-cache-size
              states them, else --mamba-full-memory-ratio 0.9 divides the memory between both
    vLLM      blocks of one pool for every layer (cache_groups.py)

How many tokens an engine makes room for is its own rule (cache_capacity.py).
"""

import math
from typing import Final

from tuner.catalog.serve_rules.traits import ONE_STATE, StateRule
from tuner.costs.serve.decoder import AttentionKind, Decoder, DecoderAttention, Formats
from tuner.costs.serve.engine import InstanceDegrees
from tuner.prices.serve.work import (
    BYTES,
    CONV_STATE_BYTES,
    INDEX_KEY_BYTES,
    STATE_BYTES,
    entry_bytes,
)
from tuner.spec.linear_attention import linear_weights
from tuner.spec.sparse_attention import (
    compressor_weights,
    indexer_queries_weights,
    indexer_weights,
)

RESERVE_BYTES: Final = 4.0e9
DEVICE_RATIO: Final = 0.88
"""Share of a device's memory for weights, caches and the reserve where no engine's rule is known
(AFD)."""
SPARSE_FP8_BYTES: Final = 656.0
"""Bytes of a token in the fp8 cache of sparse compressed attention with 512 + 64 elements: the
former in fp8 with four fp32 scales, the latter in bf16 (vLLM 0.33.0, v1/attention/backends/mla/
flashmla_sparse.py; SGLang's is the same)."""


def weight_bytes(
    decoder: Decoder,
    formats: Formats,
    degrees: InstanceDegrees,
    *,
    network_ranks: int | None = None,
) -> float:
    """Return the bytes of weights on one device.

    `network_ranks` share networks and the head; None: the ranks of attention do.
    """
    ranks, hidden = degrees.attention_tensor, decoder.hidden
    together = network_ranks or ranks
    table = decoder.vocab * hidden * formats.stored_bytes(formats.head)
    # Stages at both ends of a pipeline have a copy each.
    has_head = not decoder.is_tied or degrees.pipeline > 1
    embedding_and_head = table / ranks + has_head * table / together
    total = decoder.vision_elements * BYTES["bf16"] / ranks
    for group in decoder.layers:
        layer = _mixer_bytes(group.attention, hidden, formats, ranks)
        layer += (
            decoder.matrices
            * hidden
            * group.dense_ffn
            * formats.stored_bytes(formats.ffn)
            / together
        )
        if group.has_experts:
            layer += _experts_bytes(decoder, formats, degrees, shared_ranks=together)
        layer += (group.has_mixer + group.has_network) * connection_bytes(decoder)
        total += group.count * layer
    if degrees.pipeline == 1:
        return embedding_and_head + total
    return 0.5 * embedding_and_head + total * stage_ratio(decoder, degrees)


def connection_bytes(decoder: Decoder) -> float:
    """Return the bytes of a hyper-connection, whole on every rank in fp32; 0 of a plain residual.

    Model:   4 (2 + s) s s h
    Source:  vLLM 0.33.0, models/deepseek_v4/nvidia/model.py, `hc_attn_fn` and `hc_ffn_fn`.
    """
    streams = decoder.streams
    return 0.0 if streams == 1 else 4.0 * (2 + streams) * streams**2 * decoder.hidden


def expert_bytes(decoder: Decoder, formats: Formats) -> float:
    """Return the bytes of one routed expert of one layer."""
    ffn = 0 if decoder.experts is None else decoder.experts.ffn
    return (
        float(decoder.matrices)
        * decoder.expert_hidden
        * ffn
        * formats.stored_bytes(formats.experts)
    )


def _experts_bytes(
    decoder: Decoder, formats: Formats, degrees: InstanceDegrees, *, shared_ranks: int
) -> float:
    """Return the bytes of a layer's experts, latent projections and router on one device."""
    experts, hidden = decoder.experts, decoder.hidden
    assert experts is not None  # Decoder refuses layers without either
    routed = experts.num * expert_bytes(decoder, formats) / (degrees.moe_tensor * degrees.expert)
    shared = decoder.matrices * hidden * experts.shared_ffn / shared_ranks
    latent = 2.0 * hidden * experts.latent
    router = hidden * experts.router_outputs * BYTES["bf16"]
    around = shared * formats.stored_bytes(formats.ffn) + latent * formats.stored_bytes(
        formats.latent_projections
    )
    return routed + around + router


def attention_weight_bytes(decoder: Decoder, formats: Formats, degrees: InstanceDegrees) -> float:
    """Return bytes of all attention layers and a vision tower on one device; without a pipeline."""
    ranks = degrees.attention_tensor
    return decoder.vision_elements * BYTES["bf16"] / ranks + sum(
        group.count * _mixer_bytes(group.attention, decoder.hidden, formats, ranks)
        for group in decoder.layers
    )


def stage_ratio(decoder: Decoder, degrees: InstanceDegrees) -> float:
    """Share of all layers that the longest stage holds."""
    return math.ceil(decoder.most_stages / degrees.pipeline) / decoder.most_stages


def _mixer_bytes(attention: DecoderAttention, hidden: int, formats: Formats, ranks: int) -> float:
    inner, outer = formats.stored_bytes(formats.attention), formats.stored_bytes(formats.output)
    if attention.linear is not None:
        inner, outer = (formats.stored_bytes(dtype) for dtype in formats.linear_projections)
        shard = attention.linear.shard(ranks)
        output = shard.value_dim * hidden
        return (linear_weights(shard, hidden=hidden) - output) * inner + output * outer
    if attention.kind in (AttentionKind.LATENT, AttentionKind.SPARSE_LATENT):
        down = hidden * (attention.query_rank + attention.kv_rank + attention.rope_dim)
        nope = attention.head_dim - attention.rope_dim
        up = attention.heads * ((attention.query_rank or hidden) * attention.head_dim)
        absorbed = attention.heads * attention.kv_rank * (nope + attention.value_dim)
        down += indexer_weights(
            attention.own_indexer, query_rank=attention.query_rank, hidden=hidden
        )
        inner_bytes = (down + (up + absorbed) / ranks) * inner + absorbed / ranks * BYTES["bf16"]
        return inner_bytes + attention.heads * attention.value_dim * hidden * outer / ranks
    if attention.kind is AttentionKind.COMPRESSED:
        queries = attention.heads * attention.head_dim
        down = hidden * (attention.query_rank + attention.head_dim)
        compressor = compressor_weights(
            attention.compressor,
            head_dim=attention.head_dim,
            query_rank=attention.query_rank,
            hidden=hidden,
        )
        index = None if attention.compressor is None else attention.compressor.indexer
        scored = indexer_queries_weights(index, query_rank=attention.query_rank)
        grouped = attention.output_rank * (queries + attention.output_groups * hidden)
        quantized = (down + scored + attention.query_rank * queries / ranks) * inner
        return quantized + (compressor - scored) * BYTES["bf16"] + grouped * outer / ranks
    queries = attention.heads * (2 if attention.has_gate else 1)
    keys = 2 * max(attention.kv_heads / ranks, 1.0)
    width = queries / ranks + keys
    return attention.head_dim * hidden * (width * inner + attention.heads / ranks * outer)


def kv_bytes_per_token(
    decoder: Decoder,
    formats: Formats,
    degrees: InstanceDegrees,
    *,
    request_tokens: float | None = None,
    window_pool_ratio: float | None = None,
    states: StateRule = ONE_STATE,
    drafts: int = 0,
) -> float:
    """Return the cache bytes of one token on one device.

    A token counts as a share of a request of `request_tokens`; None: every layer keeps all tokens.

    vLLM's hybrid cache manager keeps what it must of windows. SGLang's pool of windowed layers has
    a stated share of the tokens of the other pool, TensorRT-LLM's as many as the other, unless
    `max_attention_window` says less (_torch/pyexecutor/resource_manager.py). With `request_tokens`
    what a request keeps whatever its length is shared by its tokens, too. Windows beside
    compressors are never kept whole: without such a pool they are part of what a request keeps.
    """
    total = 0.0
    for group in decoder.layers:
        attention = group.attention
        token_bytes = layer_kv_bytes(
            attention,
            formats,
            degrees.attention_tensor,
            context=degrees.context,
            side_context=degrees.side_context,
        )
        total += group.count * _entries_bytes(attention)
        if attention.window and window_pool_ratio is not None:
            token_bytes *= window_pool_ratio
        elif attention.kind is AttentionKind.COMPRESSED:
            token_bytes = 0.0
        elif attention.window and request_tokens is not None:
            token_bytes *= min(1.0, attention.window / request_tokens)
        total += group.count * token_bytes
    total *= stage_ratio(decoder, degrees)
    if request_tokens is None:
        return total
    fixed = state_bytes_per_request(decoder, degrees, states=states, drafts=drafts)
    if window_pool_ratio is not None:
        fixed -= stage_ratio(decoder, degrees) * _held_bytes(decoder, only_windows=True)
    return total + fixed / request_tokens


def layer_kv_bytes(
    attention: DecoderAttention,
    formats: Formats,
    ranks: int,
    *,
    context: int = 1,
    side_context: int = 1,
) -> float:
    """Return bytes of one token in one layer of one device, by its share of the positions."""
    share = 1.0
    if attention.kind is AttentionKind.GROUPED:
        share = max(attention.kv_heads / ranks, 1.0) / attention.kv_heads
    if attention.kind is AttentionKind.COMPRESSED:
        return entry_bytes(attention.kv_elements)
    width = 1.0 if formats.kv == "fp8" else 2.0
    token_bytes = attention.kv_elements * share * width
    is_packed = formats.packs_sparse and attention.indexer is not None and formats.kv == "fp8"
    if is_packed and attention.kv_elements == _SPARSE_ELEMENTS:
        token_bytes = SPARSE_FP8_BYTES
    index = attention.own_indexer.head_dim * INDEX_KEY_BYTES if attention.own_indexer else 0.0
    return token_bytes / context + index / side_context


def _entries_bytes(attention: DecoderAttention) -> float:
    """Return the bytes of the entries of a layer's compressor, per token that they merge."""
    if attention.compressor is None:
        return 0.0
    keys = attention.compressor.indexer.head_dim if attention.compressor.indexer else 0
    return (
        entry_bytes(attention.kv_elements) + keys * INDEX_KEY_BYTES
    ) / attention.compressor.ratio


_SPARSE_ELEMENTS: Final = 576


def state_bytes_per_request(
    decoder: Decoder,
    degrees: InstanceDegrees,
    *,
    states: StateRule = ONE_STATE,
    drafts: int = 0,
) -> float:
    """Return the cache bytes of one running request on one device that do not grow with its length.

    These are states of linear attention, windows beside compressors, and open entries of
    compressors. The last two count once whatever the rule and the drafts.

    Args:
        decoder: the model.
        degrees: of the instance.
        states: how the engine keeps them.
        drafts: tokens drafted ahead, each of which needs a state of its own.
    """
    ratio = stage_ratio(decoder, degrees)
    shards = [
        (group.count, group.attention.linear.shard(degrees.attention_tensor))
        for group in decoder.layers
        if group.attention.linear is not None
    ]
    if not shards:
        return ratio * _held_bytes(decoder)
    element = states.element_bytes(decoder.architecture)
    layer_bytes = max(
        element * shard.state_elements + CONV_STATE_BYTES * shard.conv_state_elements
        for _, shard in shards
    )
    layers = float(sum(count for count, _ in shards))
    kept = float(states.per_request + drafts)
    return layer_bytes * layers * kept * ratio


def _held_bytes(decoder: Decoder, *, only_windows: bool = False) -> float:
    """Return the bytes of windows of shared keys, and of the open entries beside them."""
    total = 0.0
    for group in decoder.layers:
        attention = group.attention
        if attention.kind is AttentionKind.COMPRESSED:
            total += group.count * attention.window * entry_bytes(attention.kv_elements)
        if attention.compressor is not None and not only_windows:
            total += (
                group.count * STATE_BYTES * attention.compressor.state_elements(attention.head_dim)
            )
    return total


def kv_tokens(
    decoder: Decoder, formats: Formats, degrees: InstanceDegrees, *, memory_bytes: float
) -> float:
    """Tokens that one device can hold where no engine's rule is known; not above 0 without room."""
    free = DEVICE_RATIO * memory_bytes - RESERVE_BYTES - weight_bytes(decoder, formats, degrees)
    return free / max(kv_bytes_per_token(decoder, formats, degrees), 1e-9)
