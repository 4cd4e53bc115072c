"""Seconds that one micro-batch takes in each block of a transformer, on one device.

A block is a piece of a layer whose kernels and collectives run one after the other: attention, a
dense feed-forward network, a MoE layer's router and experts, embedding, head. Its parts are kept
apart because they follow different rules: kernels, exposed collectives of each dimension, work done
again in the backward pass, and launches by the host.

    b s        sequences of the micro-batch, tokens of one     h   hidden size
    T          tokens of one tensor-parallel group, b s / CP   f   width of a network
    t          tensor-parallel degree                          e   bytes of an element
    a, g       query and key-value heads                       E, k  experts, those of one token

Matrix products: forward [T, k] x [k, n]; backward one for the input, [T, n] x [n, k], and one for
the weights, [n, T] x [T, k]. Memory-bound bytes are counted kernel by kernel as Megatron-Core fuses
them: norm 2 e h, residual addition 3 e h, rotation 2 e (a + g) d, gate and activation 3 e f; without
flash attention 9 (forward) and 13 (backward) bytes per attention score for mask, softmax, dropout.
Backward passes of memory-bound kernels move 1.6 times their forward bytes (5 against 3 vectors for
a gated activation, 3 against 2 for a norm).

Collectives of tensor parallelism are two per block and pass: gather and reduce-scatter with sequence
parallelism, which together move what one all-reduce moves without it (Korthikanti et al.,
arXiv:2205.05198, section 4.2.2). Routed tokens: every rank sends T/t k copies, and holds as many on
average times the expert-tensor degree; the busiest rank holds `busiest_ratio` times as many.

Not covered: quantisation kernels of fp8 recipes (below one percent), biases, router auxiliary loss.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from tuner.costs.analytic.constants import Constants
from tuner.costs.analytic.kernels import Kernels
from tuner.costs.analytic.links import (
    Groups,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    distinct_places,
)
from tuner.costs.analytic.shapes import Hardware, ModelShape, Numbers, Strategies

BACKWARD_BYTES = 1.6
"""Of memory-bound kernels over their forward bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """One pass of one micro-batch through a block."""

    forward_s: Numbers = 0.0
    """Kernels."""
    backward_s: Numbers = 0.0
    """Kernels, those of weight gradients included."""
    weight_s: Numbers = 0.0
    """Of the backward kernels, those for weight gradients."""
    again_s: Numbers = 0.0
    """Kernels and collectives of modules that are computed again, unless the whole layer is."""
    tensor_s: Numbers = 0.0
    """Exposed collectives of tensor parallelism in a forward pass."""
    tensor_backward_s: Numbers = 0.0
    context_s: Numbers = 0.0
    context_backward_s: Numbers = 0.0
    expert_s: Numbers = 0.0
    """Exposed dispatch and combine, forward; the backward pass has the same."""
    launches: Numbers = 0.0
    """Of a forward pass."""
    expert_launches: Numbers = 0.0
    """Those on top that grow with the local experts; partial graphs do not cover them."""

    def __add__(self, other: "Block") -> "Block":
        return Block(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in fields(Block)
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """What every block of one question shares."""

    model: ModelShape
    strategies: Strategies
    hardware: Hardware
    constants: Constants
    kernels: Kernels
    groups: Groups

    @property
    def norm_share(self) -> Numbers:
        """Of a tensor-parallel group's tokens, those whose norms one rank computes."""
        s = self.strategies
        return np.where(s.sequence_parallel > 0.0, 1.0 / s.tensor, 1.0)

    def hidden_bytes(self, vectors: Numbers) -> Numbers:
        """Bytes of so many passes over the hidden state outside the tensor-parallel region."""
        s = self.strategies
        return vectors * s.element_bytes * s.tokens * self.model.hidden * self.norm_share


def attention_block(setting: Setting) -> Block:
    """Norm, projections, attention over the sequence, output projection, residual addition."""
    projections = _mla_projections(setting) if _any(setting.model.is_mla) else None
    grouped = _gqa_projections(setting)
    if projections is not None:
        is_mla = setting.model.is_mla > 0.0
        grouped = _chosen(is_mla, projections, grouped)
    core = _attention_core(setting)
    return grouped + core + _around(setting, overlapped=True)


def dense_block(setting: Setting) -> Block:
    """Norm, feed-forward network, residual addition."""
    m, s = setting.model, setting.strategies
    network = _network(setting, rows=s.tokens, width=m.dense_ffn / s.tensor)
    block = replace(network, again_s=s.recompute_mlp * network.forward_s)
    return block + _around(setting, overlapped=True)


def moe_blocks(setting: Setting) -> tuple[Block, Block]:
    """Norm, router, shared experts; and what grows with the busiest rank, at that load."""
    m, s, own = setting.model, setting.strategies, setting.constants
    rows = s.tokens * setting.norm_share
    router = _product(setting, rows, m.experts, m.hidden, in_head=True)
    # Scores, top-k, probabilities and maps are some ten passes over fp32 scores. [Megatron-Core]
    router_bytes = 40.0 * rows * m.experts
    routing_s = setting.kernels.memory_bound_s(router_bytes)
    routing = Block(forward_s=routing_s, backward_s=routing_s)
    shared = _shared_experts(setting)
    fixed = router + routing + shared + _around(setting, overlapped=False)
    counted = own.expert_launches * m.experts / s.expert
    fixed = replace(fixed, launches=own.moe_launches, expert_launches=counted)
    return fixed, _routed(setting)


def embedding_block(setting: Setting) -> Block:
    """Look rows up, add positions, reduce over the vocabulary's shards."""
    s = setting.strategies
    kernels_s = setting.kernels.memory_bound_s(setting.hidden_bytes(3.0))
    reduce_s = 0.5 * _tensor_pass_s(setting)
    return Block(
        forward_s=kernels_s,
        backward_s=BACKWARD_BYTES * kernels_s,
        tensor_s=reduce_s,
        tensor_backward_s=0.5 * reduce_s * (s.sequence_parallel > 0.0),
        launches=5.0,
    )


def head_block(setting: Setting) -> Block:
    """Final norm, logits over the vocabulary's shard, cross entropy."""
    m, s = setting.model, setting.strategies
    logits = _product(setting, s.tokens, m.vocab / s.tensor, m.hidden, in_head=True)
    # bf16 logits written to fp32, maximum, exponential and sum, gradient in place. [Megatron-Core]
    loss_bytes = 10.0 * s.tokens * m.vocab / s.tensor
    loss_s = setting.kernels.memory_bound_s(loss_bytes)
    norm_s = setting.kernels.memory_bound_s(setting.hidden_bytes(2.0))
    gather_s = 0.5 * _tensor_pass_s(setting)
    return logits + Block(
        forward_s=loss_s + norm_s,
        backward_s=loss_s + BACKWARD_BYTES * norm_s,
        tensor_s=gather_s * (s.sequence_parallel > 0.0),
        tensor_backward_s=gather_s,
        launches=15.0,
    )


def joining_block(setting: Setting) -> Block:
    """What a multi-token-prediction layer has on top: two norms and the 2 h x h projection."""
    m, s = setting.model, setting.strategies
    joined = _product(setting, s.tokens, m.hidden / s.tensor, 2.0 * m.hidden)
    norms_s = setting.kernels.memory_bound_s(setting.hidden_bytes(6.0))
    pass_s = 0.5 * _tensor_pass_s(setting)
    return joined + Block(
        forward_s=norms_s,
        backward_s=BACKWARD_BYTES * norms_s,
        tensor_s=pass_s,
        tensor_backward_s=pass_s,
        launches=10.0,
    )


def _product(
    setting: Setting, rows: Numbers, n: Numbers, k: Numbers, *, in_head: bool = False
) -> Block:
    gemm_s = setting.kernels.gemm_s
    weight_s = gemm_s(n, k, rows, in_head=in_head)
    return Block(
        forward_s=gemm_s(rows, n, k, in_head=in_head),
        backward_s=gemm_s(rows, k, n, in_head=in_head) + weight_s,
        weight_s=weight_s,
    )


def _gqa_projections(setting: Setting) -> Block:
    m, s = setting.model, setting.strategies
    # With fewer key-value heads than tensor ranks, every rank still computes one.
    kv_heads = np.maximum(m.kv_heads / s.tensor, 1.0)
    wide = m.heads / s.tensor * m.head_dim + kv_heads * (m.head_dim + m.value_dim)
    inputs = _product(setting, s.tokens, wide, m.hidden)
    outputs = _product(setting, s.tokens, m.hidden, m.heads / s.tensor * m.value_dim)
    # Rotation, or with learned positions the split of queries, keys and values.
    turned = 2.0 * s.element_bytes * s.tokens * (m.heads / s.tensor + kv_heads) * m.head_dim
    turn_s = setting.kernels.memory_bound_s(turned)
    return inputs + outputs + Block(forward_s=turn_s, backward_s=turn_s)


def _mla_projections(setting: Setting) -> Block:
    m, s = setting.model, setting.strategies
    heads = m.heads / s.tensor
    rows = s.tokens
    down_rows = rows * setting.norm_share
    has_rank = m.q_lora_rank > 0.0
    queries_in = np.where(has_rank, m.q_lora_rank, m.hidden)
    down_q = _product(setting, down_rows, np.maximum(m.q_lora_rank, 1.0), m.hidden)
    down_q = _chosen(has_rank, down_q, Block())
    down_kv = _product(setting, down_rows, m.kv_lora_rank + m.rope_dim, m.hidden)
    nope = m.head_dim - m.rope_dim
    up_q = _product(setting, rows, heads * m.head_dim, queries_in)
    up_kv = _product(setting, rows, heads * (nope + m.value_dim), np.maximum(m.kv_lora_rank, 1.0))
    outputs = _product(setting, rows, m.hidden, heads * m.value_dim)
    # Norms of the latents, rotation and concatenation of queries, keys and values.
    moved = 2.0 * s.element_bytes * rows * (heads * (2.0 * m.head_dim + m.value_dim))
    moved = moved + 2.0 * s.element_bytes * down_rows * (m.q_lora_rank + m.kv_lora_rank)
    turn_s = setting.kernels.memory_bound_s(moved)
    turned = Block(forward_s=turn_s, backward_s=BACKWARD_BYTES * turn_s)
    again_s = s.recompute_mla_up_proj * (up_q.forward_s + up_kv.forward_s + turn_s)
    block = down_q + down_kv + up_q + up_kv + outputs + turned
    return replace(block, again_s=again_s)


def _attention_core(setting: Setting) -> Block:
    m, s, own = setting.model, setting.strategies, setting.constants
    heads = m.heads / s.tensor
    sequences = s.micro_batch
    pairs = sequences * _mean_pairs(m, s) / s.context
    shape = {"heads": heads, "key_dim": m.head_dim, "value_dim": m.value_dim}
    # Windows of a few tiles and attention sinks leave the kernels' fast path.
    slower = np.where((m.has_sinks > 0.0) | (m.window > 0.0), 1.0 / own.sink_ratio, 1.0)
    forward_s = slower * setting.kernels.attention_s(pairs, **shape)
    backward_s = slower * setting.kernels.attention_backward_s(pairs, **shape)
    more: Numbers = 0.0
    if not _all(s.has_flash_attention):
        plain = _plain_attention(setting)
        has_flash = s.has_flash_attention > 0.0
        more = np.where(has_flash, 0.0, plain.launches)
        forward_s = np.where(has_flash, forward_s, plain.forward_s)
        backward_s = np.where(has_flash, backward_s, plain.backward_s)
    exchange_s = _ring_s(setting)
    exposed = own.context_exposed_ratio
    return Block(
        forward_s=forward_s,
        backward_s=backward_s,
        again_s=s.recompute_core_attention * forward_s,
        context_s=_hidden_s(exchange_s, forward_s, exposed),
        context_backward_s=_hidden_s(2.0 * exchange_s, backward_s, exposed),
        launches=own.dense_launches * 0.5 + more,
    )


def _mean_pairs(m: ModelShape, s: Strategies) -> Numbers:
    """Unmasked pairs of one sequence and head, averaged over windowed and other layers."""
    every = s.sequence * (s.sequence + 1.0) / 2.0
    window = np.minimum(m.window, s.sequence)
    near = window * (window + 1.0) / 2.0 + (s.sequence - window) * window
    return m.windowed_ratio * near + (1.0 - m.windowed_ratio) * every


def _plain_attention(setting: Setting) -> Block:
    """Scores and weighted values as two batched products, all pairs, softmax between.

    Megatron's kernel for scale, mask and softmax wants a multiple of four matrices
    (megatron/model/fused_softmax.py, `is_kernel_available`); else PyTorch's single steps run, in
    fp32: scale 4, mask 5, cast 6, softmax 8, cast 6, dropout 5 bytes per score and as many back.
    """
    m, s, own = setting.model, setting.strategies, setting.constants
    batches = s.micro_batch * m.heads / s.tensor
    rows = s.sequence
    batched_s = setting.kernels.batched_gemm_s
    scores_s = batched_s(batches, rows, rows, m.head_dim)
    values_s = batched_s(batches, rows, m.value_dim, rows)
    per_byte = own.score_factor / own.memory_factor * batches * rows * rows
    is_single = np.mod(batches, 4.0) > 0.0
    softmax_s = setting.kernels.memory_bound_s(np.where(is_single, 34.0, 9.0) * per_byte)
    back_s = setting.kernels.memory_bound_s(np.where(is_single, 34.0, 13.0) * per_byte)
    return Block(
        forward_s=scores_s + values_s + softmax_s,
        backward_s=2.0 * (scores_s + values_s) + back_s,
        launches=np.where(is_single, own.single_step_launches, 0.0),
    )


def _ring_s(setting: Setting) -> Numbers:
    """Keys and values of the other ranks pass by: (CP - 1)/CP of the sequence."""
    m, s = setting.model, setting.strategies
    group = setting.groups.context
    kv_heads = np.maximum(m.kv_heads / s.tensor, 1.0)
    width = kv_heads * (m.head_dim + m.value_dim)
    total = s.element_bytes * s.micro_batch * s.sequence * width
    return all_gather_s(total, group, setting.hardware, setting.constants)


def _network(setting: Setting, *, rows: Numbers, width: Numbers) -> Block:
    m, s = setting.model, setting.strategies
    inner = np.where(m.is_gated > 0.0, 2.0, 1.0)
    up = _product(setting, rows, inner * width, m.hidden)
    down = _product(setting, rows, m.hidden, width)
    act_s = setting.kernels.memory_bound_s((inner + 1.0) * s.element_bytes * rows * width)
    block = up + down + Block(forward_s=act_s, backward_s=BACKWARD_BYTES * act_s)
    return replace(block, launches=setting.constants.dense_launches * 0.5)


def _shared_experts(setting: Setting) -> Block:
    m, s = setting.model, setting.strategies
    if not _any(m.shared_ffn):
        return Block()
    width = np.maximum(m.shared_ffn / s.tensor, 1.0)
    network = _network(setting, rows=s.tokens, width=width)
    pass_s = _tensor_pass_s(setting)
    block = replace(
        network,
        again_s=s.recompute_shared_experts * network.forward_s,
        tensor_s=pass_s,
        tensor_backward_s=pass_s,
    )
    return _chosen(m.shared_ffn > 0.0, block, Block())


def _routed(setting: Setting) -> Block:
    """Permutation, dispatch, experts, combine, on the busiest rank."""
    m, s, own = setting.model, setting.strategies, setting.constants
    sent = s.tokens / s.tensor * m.top_k
    copies = sent * s.expert_tensor * s.busiest_ratio
    width = np.maximum(m.moe_ffn / s.expert_tensor, 1.0)
    pieces = s.chunks
    products = _expert_products(setting, copies=copies / pieces, width=width, pieces=pieces)
    factor = np.where(s.fused_grouped_mlp > 0.0, own.fused_moe_factor, own.moe_memory_factor)
    per_byte = factor / own.memory_factor * copies
    act_s = setting.kernels.memory_bound_s(per_byte * 3.0 * s.element_bytes * width)
    permute_s = setting.kernels.memory_bound_s(per_byte * 6.0 * s.element_bytes * m.hidden)
    moved = Block(
        forward_s=permute_s + act_s,
        backward_s=BACKWARD_BYTES * (permute_s + act_s),
    )
    network = products + moved
    exchange_s = _exchange_s(setting, sent=sent)
    share = np.where(s.a2a_overlap > 0.0, own.expert_overlapped_ratio, 1.0)
    exposed_s = share * exchange_s
    whole_again = np.maximum(s.recompute_moe, pieces > 1.0)
    act_again = np.where(whole_again > 0.0, 0.0, s.recompute_moe_act)
    again_s = whole_again * (network.forward_s + exposed_s) + act_again * act_s
    return replace(network, again_s=again_s, expert_s=exposed_s)


def _expert_products(
    setting: Setting, *, copies: Numbers, width: Numbers, pieces: Numbers
) -> Block:
    m, s = setting.model, setting.strategies
    local = np.maximum(m.experts / s.expert, 1.0)
    rows = copies / local
    inner = np.where(m.is_gated > 0.0, 2.0, 1.0) * width
    grouped_s = setting.kernels.grouped_gemm_s
    forward_s = grouped_s(local, rows, inner, m.hidden) + grouped_s(local, rows, m.hidden, width)
    input_s = grouped_s(local, rows, m.hidden, inner) + grouped_s(local, rows, width, m.hidden)
    weight_s = grouped_s(local, inner, m.hidden, rows) + grouped_s(local, m.hidden, width, rows)
    return Block(
        forward_s=pieces * forward_s,
        backward_s=pieces * (input_s + weight_s),
        weight_s=pieces * weight_s,
    )


def _exchange_s(setting: Setting, *, sent: Numbers) -> Numbers:
    """Dispatch and combine of one pass, with the gather over expert-tensor ranks between.

    Plain all-to-all sends every copy; DeepEP and HybridEP send a token once per rank of its own
    domain and once per other domain, where it is passed on.
    """
    m, s, own, machine = setting.model, setting.strategies, setting.constants, setting.hardware
    group = setting.groups.expert
    ranks, inside = group.ranks, group.inside
    domains = ranks / inside
    row_bytes = s.element_bytes * m.hidden * s.busiest_ratio
    tokens = sent / np.maximum(m.top_k, 1.0)
    plain_in = sent * (inside - 1.0) / ranks
    plain_out = sent * (ranks - inside) / ranks
    merges = np.maximum(s.is_deepep, s.is_hybridep)
    if _any(merges):
        reached = distinct_places(ranks, m.experts, m.top_k)
        far = distinct_places(domains, m.experts, m.top_k) * (domains - 1.0) / domains
        # What arrives from other domains is passed on inside, as much as leaves to them.
        near = reached * (inside - 1.0) / inside
        plain_in = np.where(merges > 0.0, tokens * near, plain_in)
        plain_out = np.where(merges > 0.0, tokens * far, plain_out)
    once_s = all_to_all_s(plain_in * row_bytes, plain_out * row_bytes, group, machine, own)
    once_s = np.where(ranks > 1.0, once_s, 0.0)
    gathered = sent * s.expert_tensor * row_bytes
    gather_s = all_gather_s(gathered, setting.groups.expert_tensor, machine, own)
    return 2.0 * (once_s + np.where(s.expert_tensor > 1.0, gather_s, 0.0))


def _tensor_pass_s(setting: Setting) -> Numbers:
    """Exposed collectives of one block and pass over the tensor-parallel group."""
    m, s, own = setting.model, setting.strategies, setting.constants
    total = s.element_bytes * s.tokens * m.hidden
    group, machine = setting.groups.tensor, setting.hardware
    scattered = 2.0 * all_gather_s(total, group, machine, own)
    reduced = all_reduce_s(total, group, machine, own)
    whole_s = np.where(s.sequence_parallel > 0.0, scattered, reduced)
    exposed = np.where(
        s.overlap_tensor > 0.0, own.tensor_overlapped_ratio, own.tensor_exposed_ratio
    )
    return exposed * whole_s


def _around(setting: Setting, *, overlapped: bool) -> Block:
    """Norm before a block, residual addition after it, and its tensor-parallel collectives."""
    s = setting.strategies
    norm_s = setting.kernels.memory_bound_s(setting.hidden_bytes(2.0))
    add_bytes = setting.hidden_bytes(3.0 + (s.dropout > 0.0) / s.element_bytes)
    add_s = setting.kernels.memory_bound_s(add_bytes)
    pass_s: Numbers = _tensor_pass_s(setting) if overlapped else 0.0
    return Block(
        forward_s=norm_s + add_s,
        backward_s=BACKWARD_BYTES * (norm_s + add_s),
        again_s=s.recompute_layernorm * norm_s,
        tensor_s=pass_s,
        tensor_backward_s=pass_s,
    )


def _hidden_s(moved_s: Numbers, work_s: Numbers, exposed: Numbers) -> Numbers:
    """Visible part of communication beside work: what does not fit, and interference."""
    return np.maximum(moved_s - work_s, 0.0) + exposed * np.minimum(moved_s, work_s)


def _chosen(condition: Numbers, yes: Block, no: Block) -> Block:
    return Block(
        **{
            field.name: np.where(condition, getattr(yes, field.name), getattr(no, field.name))
            for field in fields(Block)
        }
    )


def _any(values: Numbers) -> bool:
    return bool(np.any(np.asarray(values) > 0.0))


def _all(values: Numbers) -> bool:
    return bool(np.all(np.asarray(values) > 0.0))
