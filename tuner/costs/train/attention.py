"""Seconds of attention: projections, core, and the ring of context parallelism.

    b s        sequences of the micro-batch, tokens of one     a, g  query and key-value heads
    T          tokens of one tensor-parallel group, b s / CP   d     width of a head
    e          bytes of an element

Flash attention computes only the unmasked pairs and keeps no scores. Without it, as in Megatron
until 2022, two batched GEMMs cover all pairs, and mask, softmax and dropout move 9 (forward) and 13
(backward) bytes per score. Attention stays in bf16 under every recipe. Rotary embedding moves
2 e (a + g) d bytes per token. Context parallelism passes keys and values around a ring, overlapped
with the computation.

Compressed attention (DeepSeek-V4) is one kernel over the tokens of a window and the entries of the
layer's compressor; projections of compressors and indexers are whole on every tensor rank, and the
weighted means move 2 e bytes per element of keys and gates.

Not covered: all-to-all over heads (Ulysses), attention biases.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import ModelShape
from tuner.costs.train.adapter_blocks import adapter_blocks
from tuner.costs.train.adapters import attention_matrices
from tuner.costs.train.packing import PackedRows
from tuner.costs.train.parts import (
    BACKWARD_BYTES,
    Block,
    BlockInputs,
    gemm,
    is_any,
    norm_and_residual,
    scale_block,
    select_block,
)
from tuner.prices.ops import attention, batched_gemm
from tuner.prices.train.collectives import all_gather_s
from tuner.spec.sparse_attention import mean_entries

TILE = 128.0
"""Queries that flash attention computes together."""


def attention_block(setting: BlockInputs) -> Block:
    """Norm, projections, attention over the sequence, output projection, residual addition."""
    grouped = _gqa_projections(setting)
    special: tuple[tuple[Numbers, Callable[[BlockInputs], Block]], ...] = (
        (setting.model.is_mla, _mla_projections),
        (setting.model.output_groups, _shared_kv_projections),
    )
    for present, projections in special:
        if is_any(present):
            grouped = select_block(np.greater(present, 0.0), projections(setting), grouped)
    core = attention_core(setting, launches=setting.constants.dense_launches * 0.5)
    adapters = adapter_blocks(setting, attention_matrices(setting.model, setting.strategies))
    return grouped + core + adapters + norm_and_residual(setting, overlapped=True)


def _gqa_projections(setting: BlockInputs) -> Block:
    m, s = setting.model, setting.strategies
    # With fewer key-value heads than tensor ranks, every rank still computes one.
    kv_heads = np.maximum(m.kv_heads / s.tensor, 1.0)
    queries = m.heads / s.tensor * m.head_dim * (1.0 + m.has_output_gate)
    wide = queries + kv_heads * (m.head_dim + m.value_dim)
    inputs = gemm(setting, s.tokens, wide, m.hidden, follows_norm=True)
    outputs = gemm(setting, s.tokens, m.hidden, m.heads / s.tensor * m.value_dim, is_scattered=True)
    # Rotation, or with learned positions the split of queries, keys and values.
    rotary = 2.0 * s.element_bytes * s.tokens * (m.heads / s.tensor + kv_heads) * m.head_dim
    gate = 3.0 * m.has_output_gate * s.element_bytes * s.tokens * m.heads / s.tensor * m.value_dim
    moved_s = setting.memory_bound_s(rotary + gate)
    return inputs + outputs + Block(forward_s=moved_s, backward_s=moved_s)


def _mla_projections(setting: BlockInputs) -> Block:
    m, s = setting.model, setting.strategies
    heads = m.heads / s.tensor
    rows = s.tokens
    down_rows = rows * setting.norm_share
    has_rank = np.greater(m.q_lora_rank, 0.0)
    queries_in = np.where(has_rank, m.q_lora_rank, m.hidden)
    down_q = gemm(setting, down_rows, np.maximum(m.q_lora_rank, 1.0), m.hidden, follows_norm=True)
    down_q = select_block(has_rank, down_q, Block())
    down_kv = gemm(setting, down_rows, m.kv_lora_rank + m.rope_dim, m.hidden, follows_norm=True)
    nope = m.head_dim - m.rope_dim
    up_q = gemm(setting, rows, heads * m.head_dim, queries_in, follows_norm=True)
    up_kv = gemm(
        setting,
        rows,
        heads * (nope + m.value_dim),
        np.maximum(m.kv_lora_rank, 1.0),
        follows_norm=True,
    )
    outputs = gemm(setting, rows, m.hidden, heads * m.value_dim, is_scattered=True)
    # Norms of the latents, rotation and concatenation of queries, keys and values.
    moved = 2.0 * s.element_bytes * rows * (heads * (2.0 * m.head_dim + m.value_dim))
    moved = moved + 2.0 * s.element_bytes * down_rows * (m.q_lora_rank + m.kv_lora_rank)
    rotary_s = setting.memory_bound_s(moved)
    rotary = Block(forward_s=rotary_s, backward_s=BACKWARD_BYTES * rotary_s)
    recomputed_s = s.recompute_mla_up_proj * (up_q.forward_s + up_kv.forward_s + rotary_s)
    block = down_q + down_kv + up_q + up_kv + outputs + rotary
    if is_any(m.index_heads):
        block = block + scale_block(m.index_share, _indexer(setting))
    return replace(block, recomputed_s=recomputed_s)


def _shared_kv_projections(setting: BlockInputs) -> Block:
    """Queries through their rank, one key, output in groups, and the layers' compressors."""
    m, s = setting.model, setting.strategies
    rows, heads = s.tokens, m.heads / s.tensor
    down_rows = rows * setting.norm_share
    groups = np.maximum(m.output_groups / s.tensor, 1.0)
    joined = groups * np.maximum(m.output_rank, 1.0)
    down = gemm(setting, down_rows, m.q_lora_rank + m.head_dim, m.hidden, follows_norm=True)
    up_q = gemm(
        setting, rows, heads * m.head_dim, np.maximum(m.q_lora_rank, 1.0), follows_norm=True
    )
    # One GEMM per group; together they do as much as one of all groups' outputs.
    grouped = gemm(setting, rows, joined, heads * m.head_dim / groups)
    outputs = gemm(setting, rows, m.hidden, joined, is_scattered=True)
    # Norms of the low rank and the key, norm and rotation of queries, rotation back of the output.
    moved = 2.0 * s.element_bytes * rows * heads * m.head_dim * 2.0
    moved = moved + 2.0 * s.element_bytes * down_rows * (m.q_lora_rank + m.head_dim)
    moved_s = setting.memory_bound_s(moved)
    block = down + up_q + grouped + outputs
    block = block + Block(forward_s=moved_s, backward_s=BACKWARD_BYTES * moved_s)
    sparse = _compressor(setting, outputs=m.csa_outputs) + _indexer(setting)
    heavy = _compressor(setting, outputs=m.hca_outputs)
    block = block + scale_block(m.csa_share, sparse) + scale_block(m.hca_share, heavy)
    recomputed_s = s.recompute_mla_up_proj * up_q.forward_s
    return replace(block, recomputed_s=recomputed_s)


def _compressor(setting: BlockInputs, *, outputs: Numbers) -> Block:
    """Keys and gates of so many elements a token, and their weighted means."""
    m, s = setting.model, setting.strategies
    projected = gemm(setting, s.tokens, np.maximum(outputs, 1.0), m.hidden, follows_norm=True)
    merged_s = setting.memory_bound_s(2.0 * s.element_bytes * s.tokens * outputs)
    return projected + Block(forward_s=merged_s, backward_s=BACKWARD_BYTES * merged_s)


def _indexer(setting: BlockInputs) -> Block:
    """Projections of an indexer and its scores, on every tensor rank, and the choice of tokens.

    Over the entries of a compressor, its keys are the compressor's. Its loss is what trains it;
    frozen, it has no backward pass.
    """
    m, s = setting.model, setting.strategies
    heads = np.maximum(m.index_heads, 1.0)
    merges = np.greater(m.csa_ratio, 0.0)
    queries = gemm(setting, s.tokens, heads * m.index_dim, np.maximum(m.q_lora_rank, 1.0))
    keys = gemm(setting, s.tokens, np.where(merges, 0.0, m.index_dim) + heads, m.hidden)
    document, documents = _documents(s)
    every = document * (document + 1.0) / 2.0
    entries = document * mean_entries(document, ratio=np.maximum(m.csa_ratio, 1.0), limit=document)
    pairs = documents * np.where(merges, entries, every) / s.context
    scores = attention(
        pairs=pairs,
        batch=documents,
        sequence=document,
        heads=heads,
        kv_heads=1.0,
        head_dim=m.index_dim,
        value_dim=0.0,
        queries=s.micro_batch * s.sequence / s.context,
    )
    scores_s = setting.prices.seconds(scores)
    # Scores are written once and read by the choice, in fp32.
    chosen_s = setting.memory_bound_s(8.0 * pairs)
    block = queries + keys
    block = block + Block(forward_s=scores_s + chosen_s, backward_s=2.0 * scores_s)
    block = replace(block, backward_s=s.is_full * block.backward_s)
    return select_block(np.greater(m.index_heads, 0.0), block, Block())


def attention_core(setting: BlockInputs, *, launches: Numbers) -> Block:
    """Attention over the sequence, with so many launches where its kernel is fused."""
    m, s, constants = setting.model, setting.strategies, setting.constants
    heads = m.heads / s.tensor
    document, documents = _documents(s)
    attended = s.micro_batch * s.sequence * s.attended
    pairs = np.where(attended, attended, documents * mean_pairs(m, document)) / s.context
    # A ring computes a part of the keys at each step; sparse attention gathers all of them first.
    has_ring = np.equal(m.index_heads, 0.0)
    forward = attention(
        pairs=pairs,
        batch=documents,
        sequence=document,
        heads=heads,
        kv_heads=np.maximum(m.kv_heads / s.tensor, 1.0),
        head_dim=m.head_dim,
        value_dim=m.value_dim,
        queries=s.micro_batch * s.sequence / np.where(has_ring, 1.0, s.context),
    )
    # Windows of a few tiles and attention sinks leave the kernels' fast path.
    slower = np.where(
        np.greater(m.has_sinks, 0.0)
        | (np.greater(m.window, 0.0) & np.equal(m.window_is_chunk, 0.0)),
        1.0 / constants.sink_ratio,
        1.0,
    )
    forward_s = slower * setting.prices.seconds(forward)
    backward_s = slower * setting.prices.seconds(replace(forward, direction="backward"))
    more: Numbers = 0.0
    if not np.all(np.greater(s.has_flash_attention, 0.0)):
        plain = _plain_attention(setting)
        has_flash = np.greater(s.has_flash_attention, 0.0)
        more = np.where(has_flash, 0.0, plain.launches)
        forward_s = np.where(has_flash, forward_s, plain.forward_s)
        backward_s = np.where(has_flash, backward_s, plain.backward_s)
    ring_s = _ring_s(setting)
    exposed = constants.context_exposed_ratio
    return Block(
        forward_s=forward_s,
        backward_s=backward_s,
        recomputed_s=s.recompute_core_attention * forward_s,
        context_s=_visible_s(ring_s, forward_s, exposed),
        context_backward_s=_visible_s(2.0 * ring_s, backward_s, exposed),
        launches=launches + more,
    )


def _documents(s: Strategies) -> tuple[Numbers, Numbers]:
    """Return tokens of a document, and documents of a micro-batch."""
    document = np.where(s.document, s.document, s.sequence)
    return document, s.micro_batch * s.sequence / document


def packed_columns(m: ModelShape, rows: PackedRows) -> dict[str, float]:
    """Return the columns of packed rows: what their block-diagonal causal masks leave.

    Padding at the end of a row attends to nothing.
    """
    slots = float(rows.num_rows * rows.capacity)
    causal = float(rows.total_R(lambda tokens: tokens * (tokens + 1.0) / 2.0).sum())
    pairs = float(rows.total_R(lambda tokens: np.asarray(mean_pairs(m, tokens))).sum())
    return {"document": 2.0 * causal / slots - 1.0, "attended": pairs / slots}


def mean_pairs(m: ModelShape, document: Numbers) -> Numbers:
    """Pairs that are computed per document and head, averaged over the attention layers.

    A window counts one tile wider, since a tile of queries reads the keys of all of them.
    """
    every = document * (document + 1.0) / 2.0
    picked = np.where(np.greater(m.index_heads, 0.0), m.index_top_k, document)
    every = np.minimum(every, _near_pairs(picked, document))
    near = _near_pairs(m.window + TILE, document)
    chunk = np.clip(m.window, 1.0, document)
    near = np.where(np.greater(m.window_is_chunk, 0.0), document * (chunk + 1.0) / 2.0, near)
    pairs = m.windowed_ratio * near + (1.0 - m.windowed_ratio) * every
    for share, ratio, limit in (
        (m.csa_share, m.csa_ratio, m.index_top_k),
        (m.hca_share, m.hca_ratio, document),
    ):
        if is_any(share):
            entries = mean_entries(document, ratio=np.maximum(ratio, 1.0), limit=limit)
            pairs = pairs + share * document * entries
    return pairs


def _near_pairs(window: Numbers, sequence: Numbers) -> Numbers:
    """Pairs of a query and the tokens of a window that ends with it."""
    window = np.minimum(window, sequence)
    return window * (window + 1.0) / 2.0 + (sequence - window) * window


def _plain_attention(setting: BlockInputs) -> Block:
    """Scores and weighted values as two batched GEMMs over all pairs, softmax between.

    Megatron's fused kernel for scale, mask and softmax needs a multiple of four matrices
    (megatron/model/fused_softmax.py, `is_kernel_available`); else unfused PyTorch operations run in
    fp32: scale 4, mask 5, cast 6, softmax 8, cast 6, dropout 5 bytes per score and as many back.
    """
    m, s, constants = setting.model, setting.strategies, setting.constants
    batches = s.micro_batch * m.heads / s.tensor
    rows = s.sequence
    scores_s = setting.prices.seconds(batched_gemm(batches, rows, rows, m.head_dim))
    values_s = setting.prices.seconds(batched_gemm(batches, rows, m.value_dim, rows))
    per_byte = constants.score_factor / constants.memory_factor * batches * rows * rows
    is_single = np.mod(batches, 4.0) > 0.0
    softmax_s = setting.memory_bound_s(np.where(is_single, 34.0, 9.0) * per_byte)
    back_s = setting.memory_bound_s(np.where(is_single, 34.0, 13.0) * per_byte)
    return Block(
        forward_s=scores_s + values_s + softmax_s,
        backward_s=2.0 * (scores_s + values_s) + back_s,
        launches=np.where(is_single, constants.single_step_launches, 0.0),
    )


def _ring_s(setting: BlockInputs) -> Numbers:
    """Seconds of the ring that passes the other ranks' keys and values: (CP - 1)/CP of them."""
    m, s = setting.model, setting.strategies
    group = setting.groups.context
    kv_heads = np.maximum(m.kv_heads / s.tensor, 1.0)
    width = kv_heads * (m.head_dim + m.value_dim)
    total = s.element_bytes * s.micro_batch * s.sequence * width
    return all_gather_s(total, group, setting.hardware, setting.constants)


def _visible_s(moved_s: Numbers, work_s: Numbers, exposed: Numbers) -> Numbers:
    """Exposed part of communication that overlaps computation: the excess, and interference."""
    return np.maximum(moved_s - work_s, 0.0) + exposed * np.minimum(moved_s, work_s)
