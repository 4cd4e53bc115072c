"""Seconds of a MoE layer: router, shared experts, permutation, dispatch, experts, combine.

    T          tokens of one tensor-parallel group             t     tensor-parallel degree
    h          hidden size; of a copy the latent width if any  E, k  experts, those of one token
    e          bytes of an element                             f     width of an expert
    z          experts without weights

Every rank sends T/t k copies of tokens, and receives as many on average times the expert-tensor
degree. The most-loaded rank holds `expert_imbalance` times as many and sets the time of everything
that follows the router. Permutation moves 6 e h bytes per copy and pass, the activation 3 e f, or
2 e f without a gate.

With experts without weights the router scores E + z, and k is the mean of the copies that experts
compute; the others are an addition of T/t h elements on the token's own rank, 3 e h bytes a token.

Not covered: HybridEP's maps gathered again by recomputation, auxiliary losses, capacity factors,
experts that overlap with shared ones, dispatch behind the next layer's dense computation (shortcut-
connected MoE).
"""

from dataclasses import replace

import numpy as np

from tuner.config.columns import Numbers
from tuner.costs.train.adapter_blocks import adapter_blocks, expert_adapters
from tuner.costs.train.adapters import network_matrices
from tuner.costs.train.expert_capacity import buffer_rows
from tuner.costs.train.limited_routing import reached_places
from tuner.costs.train.parts import (
    BACKWARD_BYTES,
    Block,
    BlockInputs,
    feed_forward,
    gemm,
    is_any,
    norm_and_residual,
    quantisation,
    select_block,
    tensor_pass_s,
    trained,
)
from tuner.prices.ops import BF16, trained_experts
from tuner.prices.train.collectives import all_gather_s, all_to_all_s, gathered_s


def moe_blocks(setting: BlockInputs) -> tuple[Block, Block]:
    """Norm, router and shared experts; and routed experts, on the most-loaded rank."""
    m, s = setting.model, setting.strategies
    rows = s.tokens * setting.norm_share
    router = gemm(setting, rows, m.router_outputs, m.hidden, dtype=BF16)
    # Scores, top-k, probabilities and maps are some ten passes over fp32 scores. [Megatron-Core]
    router_bytes = 40.0 * rows * m.router_outputs
    routing_s = setting.memory_bound_s(router_bytes)
    routing = Block(forward_s=routing_s, backward_s=routing_s)
    shared = _shared_experts(setting) + _latent_projections(setting) + _zero_experts(setting)
    fixed = router + routing + shared + norm_and_residual(setting, overlapped=False)
    fixed = replace(fixed, launches=_launches(setting), expert_launches=expert_launches(setting))
    return fixed, _routed(setting)


def _launches(setting: BlockInputs) -> Numbers:
    """Count the launches of a forward pass, without those by expert.

    Two latent projections launch like a network.
    """
    latent = np.greater(setting.model.moe_latent, 0.0)
    return setting.constants.moe_launches + 0.5 * setting.constants.dense_launches * latent


def expert_launches(setting: BlockInputs) -> Numbers:
    """Return the launches of local experts in a forward pass.

    In narrow types each quantises before every GEMM. Ungrouped, each has GEMMs and an
    activation of its own (SequentialMLP of megatron-core).
    """
    is_each = setting.is_narrow | np.greater(setting.strategies.sequential_experts, 0.0)
    of_one = setting.constants.expert_launches * np.where(is_each, 1.0, 0.5)
    return of_one * setting.model.experts / setting.strategies.expert


def _shared_experts(setting: BlockInputs) -> Block:
    m, s = setting.model, setting.strategies
    if not is_any(m.shared_ffn):
        return Block()
    width = np.maximum(m.shared_ffn / s.tensor, 1.0)
    inner = feed_forward(setting, rows=s.tokens, width=width)
    inner = inner + adapter_blocks(setting, network_matrices(m, s, m.shared_ffn))
    pass_s = tensor_pass_s(setting)
    block = replace(
        inner,
        recomputed_s=s.recompute_shared_experts * inner.forward_s,
        tensor_s=pass_s,
        tensor_backward_s=pass_s,
    )
    return select_block(np.greater(m.shared_ffn, 0.0), block, Block())


def _latent_projections(setting: BlockInputs) -> Block:
    """Projections into and out of the experts' latent width, on every token of the rank."""
    m, s = setting.model, setting.strategies
    if not is_any(m.moe_latent):
        return Block()
    rows, width = s.tokens * setting.norm_share, np.maximum(m.moe_latent, 1.0)
    both = gemm(setting, rows, width, m.hidden) + gemm(setting, rows, m.hidden, width)
    return select_block(np.greater(m.moe_latent, 0.0), both, Block())


def _zero_experts(setting: BlockInputs) -> Block:
    """The sum of a token's copies for experts without weights: itself times their weights."""
    m = setting.model
    if not is_any(m.zero_experts):
        return Block()
    added_s = setting.memory_bound_s(setting.hidden_bytes(3.0))
    added = Block(forward_s=added_s, backward_s=BACKWARD_BYTES * added_s)
    return select_block(np.greater(m.zero_experts, 0.0), added, Block())


def _routed(setting: BlockInputs) -> Block:
    """Permutation, dispatch, experts, combine, on the most-loaded rank."""
    m, s, constants = setting.model, setting.strategies, setting.constants
    sent = s.tokens / s.tensor * m.top_k
    copies = sent * s.expert_tensor * s.expert_imbalance
    width = np.maximum(m.moe_ffn / s.expert_tensor, 1.0)
    pieces = s.chunks
    local = np.maximum(m.experts / s.expert, 1.0)
    inner = np.where(np.greater(m.is_gated, 0.0), 2.0, 1.0) * width
    network = trained_experts(
        local, copies / pieces / local, hidden=m.expert_hidden, ffn=width, inner=inner
    )
    gemms = trained(setting, network, pieces=pieces) + quantisation(
        setting,
        inputs=copies * (m.expert_hidden + width),
        gradients=copies * (m.expert_hidden + inner),
    )
    factor = np.where(
        np.greater(s.fused_grouped_mlp, 0.0),
        constants.fused_moe_factor,
        constants.moe_memory_factor,
    )
    per_byte = factor / constants.memory_factor * copies
    rows = per_byte * np.maximum(buffer_rows(m, s) / s.expert_imbalance, 1.0)
    act_s = setting.memory_bound_s(rows * (1.0 + inner / width) * s.element_bytes * width)
    permute_s = setting.memory_bound_s(per_byte * 6.0 * s.element_bytes * m.expert_hidden)
    moved = Block(
        forward_s=permute_s + act_s,
        backward_s=BACKWARD_BYTES * (permute_s + act_s),
    )
    whole = gemms + moved + expert_adapters(setting, copies=copies)
    dispatch_combine_s = _dispatch_combine_s(setting, sent=sent)
    share = np.where(s.a2a_overlap > 0.0, constants.expert_overlapped_ratio, 1.0)
    exposed_s = share * dispatch_combine_s
    recompute_whole = np.where(np.greater(pieces, 1.0), 1.0, s.recompute_moe)
    recompute_act = np.where(np.greater(recompute_whole, 0.0), 0.0, s.recompute_moe_act)
    recomputed_s = recompute_whole * (whole.forward_s + exposed_s) + recompute_act * act_s
    # Half of everything is repeated by operation (units.py).
    beyond_half = s.recompute_by_op * (2.0 * constants.repeated_experts_ratio - 1.0)
    recomputed_s = np.maximum(recomputed_s, beyond_half * whole.forward_s)
    return replace(
        whole,
        recomputed_s=recomputed_s,
        recomputed_expert_s=recompute_whole * exposed_s,
        expert_s=exposed_s,
    )


def _dispatch_combine_s(setting: BlockInputs, *, sent: Numbers) -> Numbers:
    """Dispatch and combine of one pass, with the all-gather over expert-tensor ranks between.

    Plain all-to-all sends every copy; DeepEP and HybridEP send a token once per rank of its own
    domain and once per other domain, where it is forwarded. HybridEP gathers all ranks' maps of
    tokens to experts first, a byte each, and reads them (deepseek-ai/DeepEP, branch hybrid-ep,
    executor, `allgather_routing_map`), once; half is counted in each pass.
    """
    m, s = setting.model, setting.strategies
    constants, machine = setting.constants, setting.hardware
    group = setting.groups.expert
    ranks, inside = group.ranks, group.inside
    domains = ranks / inside
    # Of a value on its way there and back, in the mean: both take as long as that twice.
    out_bytes = np.where(np.greater(s.dispatch_bytes, 0.0), s.dispatch_bytes, s.element_bytes)
    moved_bytes = 0.5 * (out_bytes + s.element_bytes)
    row_bytes = moved_bytes * m.expert_hidden * s.expert_imbalance
    tokens = sent / np.maximum(m.top_k, 1.0)
    plain_in = sent * (inside - 1.0) / ranks
    plain_out = sent * (ranks - inside) / ranks
    merges = np.maximum(s.is_deepep, s.is_hybridep)
    if is_any(merges):
        reached = reached_places(m, ranks)
        far = reached_places(m, domains) * (domains - 1.0) / domains
        # Tokens from other domains are forwarded inside, as many as are sent to other domains.
        near = reached * (inside - 1.0) / inside
        plain_in = np.where(np.greater(merges, 0.0), tokens * near, plain_in)
        plain_out = np.where(np.greater(merges, 0.0), tokens * far, plain_out)
    once_s = all_to_all_s(
        plain_in * row_bytes, plain_out * row_bytes, group, machine, constants, is_merged=merges
    )
    gathered = sent * s.expert_tensor * row_bytes
    gather_s = all_gather_s(gathered, setting.groups.expert_tensor, machine, constants)
    maps_s: Numbers = 0.0
    if is_any(s.is_hybridep):
        is_spread = s.is_hybridep * np.greater(ranks, 1.0)
        map_bytes = is_spread * tokens * m.experts * ranks
        maps_s = gathered_s(map_bytes, group, machine, constants)
        maps_s = maps_s + setting.memory_bound_s(map_bytes)
    return 2.0 * (once_s + np.where(s.expert_tensor > 1.0, gather_s, 0.0)) + 0.5 * maps_s
