"""Bytes that one layer keeps for its backward pass, per micro-batch, on one rank.

Of n = N / T tokens of this rank (N of its tensor group; n = N without sequence parallelism), R
routed copies that it receives, D bytes an element, B an element of what linear layers keep of their
input (but D for the norm's output before experts, which the router reads too):

    residuals     2 n h D                    inputs of both norms
    streams       2 n (S + 2) h D            instead of them, of S streams: they, the input mixed
                                             from them, the output to add
    norm outputs  2 n h B                    inputs of attention and of the network behind it
    attention     N (a + g) (d + v) D / T    q, k, v and the core's output; g at least T
    flash         4 N a / T                  log-sum-exp
    MLA           n (2 r_q + 2 r_kv + rope) D   low ranks before and after their norms, on top
    shared KV     n (2 r_q + 2 d) D + N (G o / T + c) D    instead of low ranks: c outputs of
                                             compressors
    indexer       N ((a_i (d_i + 1) + d_i) D + 8 k_i)    queries, weights, keys (over compressors
                                             none of its own), the chosen tokens
    output in fp8 N a v B / T                where B < D: what the output projection reads
    q, k norm     N (a + g) d D / T          where there is one: q and k before it
    output gate   2 N a v D / T              where there is one: the gate, and its product
    linear        N (w + 2 H P) D / T        Mamba-2: projections, output, normed output
                  N (c + 2 H N' + H Q) D / T     a delta rule besides: what the convolution gives,
                                             q and k of all heads, inverses of chunks' triangles
    dense FFN     N F (2 D + B) / T          gate, up and gate * up; N F (D + B) / T ungated
    router        4 n E + 8 n k              fp32 probabilities, the map of copies
    shared        N F_s (2 D + B) / T
    experts       R (h B + F_e (2 D + B) / ETP)   a copy, gate, up and gate * up
    latent        n l (D + B)                its input to dispatch, and what is combined
    no flash      N a s (2 + 3 dropout) / T   softmax; its mask and output under dropout (D = 2)
    dropout       2 N h                      masks of both residual branches, one byte each

and, after the last layer, 2 n h D for the final norm and N V / T logits. R is n k ETP times the P99
imbalance over passes. A recomputed module keeps only its input:

    core_attention    drops softmax, masks and log-sum-exp     layernorm      drops norm outputs
    mlp               drops the dense network and its input    moe_act        drops gate * up
    moe, chunks > 1   drops router, shared and experts         shared_experts drops them
    mla_up_proj       drops q, k, v                            full           keeps only n h D
    by op             keeps n h D, the core's output, outputs of reduce-scatters and all-to-alls,
                      and every second GEMM's output, in eager mode also that of a last GEMM

Dropped activations are recomputed, one layer at a time, in its backward pass: `recomputed`.

Selective checkpointing by operation keeps every second GEMM's output, grouped ones excepted, and
what collectives return (`_op_sac_save_list`, torchtitan 0.2.0 to 0.2.2). GEMMs count through a
layer: q, k, v, output; of MLA q, low ranks, k and v together, output, and two for q where it has a
low rank, which shifts those behind them; router, gate, up, down. Without expert parallelism no
all-to-all keeps copies, nor did any before September 2025 (torchtitan#1672; `keeps_exchanged`).
PyTorch in eager mode keeps an output whether or not the backward pass reads it
(torch/utils/checkpoint.py, a cache of outputs by operation). A compiled layer keeps only what its
backward graph reads (torch/_functorch/partitioners.py), so not the last GEMM's output, which is
added to the residual.

GEMMs in NVFP4 are an operation of TorchAO's own, whose output is none of those: 63.5 GiB less of
Llama 8B with 65,536 tokens and 27 of 32 layers in it, 34.3 GiB of Qwen3 8B with 32,768 and 30 of 36
(torchtitan's components/quantization/nvfp4.md of August 2026).

torchtitan multiplies routed copies by their scores in fp32 and keeps them for the scores' gradient,
before the experts or behind them (models/moe/moe.py of 0.2.0 to 0.2.2, token_dispatcher.py of
0.3.0), under DeepEP in their own type (distributed/deepep/deepep.py). In eager mode the output of
the activation is kept beside its product with up.

Frozen weights need no input (Transformer Engine keeps it where `weight.requires_grad`): norm
outputs, gate * up and linear attention's normed output are kept where an adapter reads them, and
every adapter keeps its inner width.

Letters as in state.py; of linear attention H heads, N' key width, P value width, Q tokens of a
chunk, w outputs of its projections, c channels of its convolution. A layer without a mixer, or
without a network, lacks that part's residual, too.

Sources: Korthikanti et al., arXiv 2205.05198, section 4 (34 s b h + 5 a s^2 b); FlashAttention,
arXiv 2205.14135 (log-sum-exp in place of the scores); Megatron-LM's MoE layer, which multiplies by
the router's weights inside the experts; MemFine, arXiv 2511.21431 (chunks); torchtitan,
torchtitan/distributed/activation_checkpoint.py (by operation).

Megatron's tensor parallelism keeps the rank's shard of a linear layer's input and repeats the
all-gather in the backward pass. PyTorch's all-gather is an operation of its own, whose result is
saved for the backward pass (PrepareModuleInput in torchtitan's parallelize_llama): (N - n) h B more
before attention, and as much before a dense network. There gate and up each return a gradient of
the whole input, N h D, and their sum is copied once more for the reduce-scatter, which splits only
dimension 0 (torch/distributed/_functional_collectives.py).

Not covered: capacity limits, attention sinks, scales of fp8 blocks; that PyTorch's tensor
parallelism gathers what experts read, and torchao's in fp8.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import ModelShape
from tuner.costs.train.adapters import (
    AdaptedMatrix,
    attention_matrices,
    keeps_input,
    linear_matrices,
    network_matrices,
)
from tuner.costs.train.expert_capacity import buffer_rows
from tuner.costs.train.state import padded_vocab

SCORE_BYTES = 4.0
"""Log-sum-exp, norm scales and router probabilities are fp32."""

INDEX_BYTES = 8.0
"""A 64-bit index: where a routed copy went, or which token an indexer chose."""

MASK_BYTES = 1.0
"""Bytes of an element of a dropout mask."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerBytes:
    """Bytes of one layer and micro-batch."""

    saved: Numbers
    """Bytes kept from forward to backward pass."""
    recomputed: Numbers
    """Bytes added while this layer is recomputed."""
    gradients: Numbers
    """Bytes added while the backward pass of its largest network runs."""
    late: Numbers = 0.0
    """Bytes of all activations and their gradients that are alive at the end of the network's
    backward pass; eager modules only."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActivationBytes:
    """Bytes per micro-batch of every kind of layer."""

    dense: LayerBytes
    moe: LayerBytes
    embedding: Numbers
    norm: Numbers
    """The last norm and its output."""
    logit: Numbers
    """Bytes of all logits at one byte each."""
    head_gradient: Numbers
    """Gradient of the head's input; with sequence parallelism that input gathered from the tensor
    group, its whole gradient and the own part of it."""
    boundary: Numbers
    """Activations sent between two stages."""


def activation_bytes(
    model: ModelShape,
    strategies: Strategies,
    *,
    cp_output_copy_ratio: Numbers,
    last_gemm_ratio: Numbers = 1.0,
    keeps_exchanged: Numbers = 1.0,
    gathers_inputs: Numbers = 0.0,
    scored_bytes: Numbers = 0.0,
    keeps_activations: Numbers = 0.0,
) -> ActivationBytes:
    """Count what one layer of each kind keeps.

    Under context parallelism `cp_output_copy_ratio` of attention's output is kept twice: in the
    order before and after tokens are redistributed to their ranks. Under checkpointing by operation
    `last_gemm_ratio` of the dense network's last GEMM output is kept: 1 in eager mode, 0 compiled.
    `gathers_inputs` of 1 means PyTorch's tensor parallelism. `scored_bytes` an element of every
    routed copy are kept for the scores' gradient, and where `keeps_activations` is 1 what a gated
    network's activation returns.
    """
    width = strategies.element_bytes
    group = strategies.tokens
    local_tokens = group / np.where(
        np.asarray(strategies.sequence_parallel) > 0.0, strategies.tensor, 1.0
    )
    hidden = local_tokens * model.hidden * width
    residual = local_tokens * model.residual_width * width
    whole = group * model.hidden * width
    attention = _attention(model, strategies, local_tokens, cp_output_copy_ratio)
    linear = _linear(model, strategies)
    norm_input = local_tokens * model.hidden * _linear_bytes(strategies)
    keep = (
        _keeps_attention_input(strategies),
        keeps_input(strategies, np.minimum(strategies.linear_adapters, 1.0)),
    )
    parts = (attention, linear)
    dense = _dense(
        model,
        strategies,
        _mix(parts, keep, shares=(model.dense_attention, model.dense_linear)),
        norm_input=norm_input
        * keeps_input(strategies, strategies.adapts_gate, strategies.adapts_up),
        last_gemm_output=last_gemm_ratio * hidden,
        keeps_activations=keeps_activations,
    )
    moe = _moe(
        model,
        strategies,
        local_tokens,
        _mix(parts, keep, shares=(model.moe_attention, model.moe_linear)),
        last_gemm_output=last_gemm_ratio * hidden,
        keeps_exchanged=keeps_exchanged,
        scored_bytes=scored_bytes,
        keeps_activations=keeps_activations,
    )
    others = gathers_inputs * (group - local_tokens) * model.hidden * _linear_bytes(strategies)
    partial = gathers_inputs * np.where(local_tokens < group, (2.0 + model.is_gated) * whole, 0.0)
    return ActivationBytes(
        dense=_layer(
            model,
            strategies,
            norm_input,
            local_tokens,
            dense,
            gathered=2.0 * others,
            partial=partial,
        ),
        moe=_layer(model, strategies, norm_input, local_tokens, moe, gathered=others),
        embedding=strategies.dropout * local_tokens * model.hidden * MASK_BYTES,
        norm=2.0 * hidden + SCORE_BYTES * local_tokens,
        logit=group * padded_vocab(model, strategies) / strategies.tensor,
        head_gradient=np.where(local_tokens < group, 2.0 * whole + hidden, hidden),
        boundary=residual,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """One part of a layer, in bytes."""

    whole: Numbers
    """Bytes kept without recomputation."""
    by_op_saved: Numbers
    """Bytes kept under checkpointing by operation."""
    dropped: Numbers
    """Bytes dropped by the recomputed modules."""
    recomputed: Numbers
    """Part of `dropped` that is resident at once when recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Mix:
    """The mixers of a kind of layer, averaged over its layers."""

    part: _Part
    ratio: Numbers
    """Share of the layers that have one."""
    input_ratio: Numbers
    """Share of all layers whose mixer keeps the norm's output."""
    beyond: Numbers
    """Bytes that the largest mixer keeps beyond the average."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """Parts of a layer besides its residuals and the norm before its mixer."""

    mixer: _Mix
    network: _Part
    network_ratio: Numbers
    """Share of the layers that have a network."""
    network_input: Numbers
    drops_network_input: Numbers
    gradients: Numbers
    later: Numbers
    """Part of the network's bytes: chunks that are recomputed after others are released."""


def _layer(
    model: ModelShape,
    strategies: Strategies,
    normed: Numbers,
    local_tokens: Numbers,
    parts: _Layer,
    *,
    gathered: Numbers,
    partial: Numbers = 0.0,
) -> LayerBytes:
    hidden = local_tokens * model.hidden * strategies.element_bytes
    kept_input = local_tokens * model.residual_width * strategies.element_bytes
    masks = 2.0 * strategies.dropout * hidden / strategies.element_bytes * MASK_BYTES
    scales = 2.0 * SCORE_BYTES * local_tokens
    attention, network = parts.mixer.part, parts.network
    normed = parts.mixer.input_ratio * normed
    norms = normed + parts.network_input
    # Streams, what is mixed from them, and what is added to them.
    around = kept_input + model.has_streams * 2.0 * hidden
    inputs = (parts.mixer.ratio + parts.network_ratio) * around
    whole = inputs + norms + scales + masks + attention.whole + network.whole + gathered
    drops_norm = strategies.recompute_layernorm
    dropped_norms = (
        drops_norm * normed
        + np.maximum(drops_norm, parts.drops_network_input) * parts.network_input
    )
    dropped = dropped_norms + attention.dropped + network.dropped
    full, by_op = strategies.recompute_full, strategies.recompute_by_op
    reduced = np.where(
        local_tokens < strategies.tokens, parts.mixer.ratio + parts.network_ratio, 0.0
    )
    by_op_saved = kept_input + attention.by_op_saved + network.by_op_saved + reduced * hidden
    everything = whole - kept_input - parts.later + parts.mixer.beyond
    return LayerBytes(
        saved=(1.0 - full - by_op) * (whole - dropped) + full * kept_input + by_op * by_op_saved,
        recomputed=np.where(
            full + by_op > 0.0,
            everything,
            np.maximum(attention.recomputed, network.recomputed),
        ),
        gradients=parts.gradients + kept_input + partial,
    )


def _linear_bytes(strategies: Strategies) -> Numbers:
    chosen = np.asarray(strategies.linear_bytes)
    return np.where(chosen > 0.0, chosen, strategies.element_bytes)


def _attention(
    model: ModelShape, strategies: Strategies, local_tokens: Numbers, cp_output_copy_ratio: Numbers
) -> _Part:
    width = strategies.element_bytes
    tokens = strategies.tokens / strategies.tensor
    # With fewer key-value heads than tensor ranks, every rank still keeps one.
    kv_heads = np.maximum(model.kv_heads, strategies.tensor)
    key_heads = np.where(np.asarray(model.is_mla) > 0.0, model.heads, kv_heads)
    key_heads = (1.0 - model.is_shared_kv) * key_heads
    projected = model.heads * model.head_dim + key_heads * (model.head_dim + model.value_dim)
    projected = tokens * projected * width
    normed = model.heads * model.head_dim + kv_heads * model.head_dim
    normed = model.has_qk_norm * tokens * normed * width
    output = tokens * model.heads * model.value_dim
    linear = _linear_bytes(strategies)
    quantised = np.where(linear < width, linear, 0.0) * output
    quantised = quantised * keeps_input(strategies, strategies.adapts_o)
    output = output * width
    low_ranks = 2.0 * (model.q_lora_rank + model.kv_lora_rank) + model.rope_dim
    indexer = model.index_share * _indexer(model, strategies)
    low_ranks = model.is_mla * (local_tokens * low_ranks * width + indexer)
    low_ranks = low_ranks + model.is_shared_kv * _shared_kv(model, strategies, local_tokens)
    flash = strategies.has_flash_attention
    scores = tokens * model.heads * SCORE_BYTES * flash
    square = tokens * model.heads * strategies.sequence
    scores = scores + (1.0 - flash) * square * (width + strategies.dropout * (width + MASK_BYTES))
    redistributed = (
        np.where(np.asarray(strategies.context) > 1.0, cp_output_copy_ratio, 0.0) * output
    )
    dropped = (
        strategies.recompute_core_attention * scores
        + strategies.recompute_mla_up_proj * model.is_mla * projected
    )
    gated = 2.0 * model.has_output_gate * output
    whole = projected + normed + output + gated + quantised + redistributed + low_ranks + scores
    gemms = _every_second_gemm(model, strategies, local_tokens, key_heads) * width
    by_op_saved = (1.0 - strategies.opaque_gemm_ratio) * gemms
    whole = whole + _inner_widths(strategies, attention_matrices(model, strategies))
    return _Part(
        whole=whole, by_op_saved=by_op_saved + output + scores, dropped=dropped, recomputed=dropped
    )


def _has_five_gemms(model: ModelShape) -> npt.NDArray[np.bool_]:
    """Return whether attention has an odd number of GEMMs: MLA whose queries have a low rank."""
    has_rank: npt.NDArray[np.bool_] = np.greater(model.is_mla * model.q_lora_rank, 0.0)
    return has_rank


def _every_second_gemm(
    model: ModelShape, strategies: Strategies, local_tokens: Numbers, key_heads: Numbers
) -> Numbers:
    """Elements of attention's first, third and any fifth GEMM's output."""
    tokens = strategies.tokens / strategies.tensor
    queries = model.heads * model.head_dim
    grouped = tokens * (queries + key_heads * model.value_dim)
    up = model.heads * (model.head_dim - model.rope_dim + model.value_dim)
    low_ranks = model.q_lora_rank + model.kv_lora_rank + model.rope_dim
    of_five = local_tokens * low_ranks + strategies.tokens * model.hidden
    latent = np.where(_has_five_gemms(model), of_five, tokens * (queries + up))
    return np.where(np.greater(model.is_mla, 0.0), latent, grouped)


def _shared_kv(model: ModelShape, strategies: Strategies, local_tokens: Numbers) -> Numbers:
    """Return the bytes of shared KV: low ranks, the key, groups, compressors."""
    ranks = local_tokens * 2.0 * (model.q_lora_rank + model.head_dim)
    groups = model.output_groups * model.output_rank / strategies.tensor
    merged = model.csa_share * model.csa_outputs + model.hca_share * model.hca_outputs
    kept = (ranks + strategies.tokens * (groups + merged)) * strategies.element_bytes
    # The keys of its indexers are their compressors'.
    return kept + model.csa_share * _indexer(model, strategies, keys=0.0)


def _indexer(model: ModelShape, strategies: Strategies, *, keys: Numbers = 1.0) -> Numbers:
    """Queries, weights and keys of an indexer, whole on every tensor rank, and what it chose.

    Its loss reads them (Megatron-Core, `FusedDSAIndexerLoss` of core_v0.19.0); frozen, it has none.
    """
    has_one = np.greater(model.index_heads, 0.0)
    vectors = model.index_heads * (model.index_dim + 1.0) + keys * model.index_dim
    entries = strategies.sequence / np.maximum(model.csa_ratio, 1.0)
    chosen = np.minimum(model.index_top_k, entries) * INDEX_BYTES
    kept = strategies.is_full * vectors * strategies.element_bytes
    return has_one * strategies.tokens * (kept + chosen)


def _inner_widths(strategies: Strategies, matrices: tuple[AdaptedMatrix, ...]) -> Numbers:
    """Return the bytes that adapters keep between their two GEMMs."""
    ratios: Numbers = 0.0
    for matrix in matrices:
        ratios = ratios + matrix.ratio * (1.0 - matrix.shares_input)
    rank = strategies.tokens * strategies.adapter_rank / strategies.tensor
    return rank * strategies.element_bytes * ratios


def _linear(model: ModelShape, strategies: Strategies) -> _Part:
    if not model.has_linear:
        return _Part(whole=0.0, by_op_saved=0.0, dropped=0.0, recomputed=0.0)
    tokens = strategies.tokens / strategies.tensor
    repeated = 2.0 * model.linear_heads * model.linear_key_dim
    of_delta = model.linear_conv + repeated + model.linear_heads * model.linear_chunk
    keeps_output = keeps_input(strategies, strategies.adapts_linear_out)
    outputs = (1.0 + keeps_output) * model.linear_values
    kept = model.linear_inputs + outputs + model.linear_is_delta * of_delta
    linear = _linear_bytes(strategies)
    quantised = np.where(linear < strategies.element_bytes, linear, 0.0) * model.linear_values
    whole = tokens * (kept * strategies.element_bytes + keeps_output * quantised)
    whole = whole + _inner_widths(strategies, linear_matrices(model, strategies))
    return _Part(whole=whole, by_op_saved=whole, dropped=0.0, recomputed=0.0)


def _keeps_attention_input(s: Strategies) -> Numbers:
    return keeps_input(s, s.adapts_q, s.adapts_k, s.adapts_v, s.adapts_q_down, s.adapts_kv_down)


def _mix(
    parts: tuple[_Part, _Part], keep: tuple[Numbers, Numbers], *, shares: tuple[Numbers, Numbers]
) -> _Mix:
    """Average softmax and linear attention, `keep` 1 where one keeps its input."""
    (attention, linear), (attention_share, linear_share) = parts, shares
    part = _Part(
        whole=attention_share * attention.whole + linear_share * linear.whole,
        by_op_saved=attention_share * attention.by_op_saved + linear_share * linear.by_op_saved,
        dropped=attention_share * attention.dropped,
        recomputed=np.greater(attention_share, 0.0) * attention.recomputed,
    )
    largest = np.maximum(
        np.greater(attention_share, 0.0) * attention.whole,
        np.greater(linear_share, 0.0) * linear.whole,
    )
    return _Mix(
        part=part,
        ratio=attention_share + linear_share,
        input_ratio=attention_share * keep[0] + linear_share * keep[1],
        beyond=largest - part.whole,
    )


def _dense(
    model: ModelShape,
    strategies: Strategies,
    mixer: _Mix,
    *,
    norm_input: Numbers,
    last_gemm_output: Numbers,
    keeps_activations: Numbers,
) -> _Layer:
    width = strategies.element_bytes
    present = model.dense_network
    intermediate = strategies.tokens * model.dense_ffn / strategies.tensor
    kept = keeps_input(strategies, strategies.adapts_down) * _linear_bytes(strategies)
    gates = (1.0 + (1.0 + keeps_activations) * model.is_gated) * width
    whole = present * intermediate * (gates + kept)
    adapters = network_matrices(model, strategies, model.dense_ffn)
    whole = whole + present * _inner_widths(strategies, adapters)
    dropped = strategies.recompute_mlp * whole
    return _Layer(
        mixer=mixer,
        network_ratio=present,
        network=_Part(
            whole=whole,
            by_op_saved=present
            * (1.0 - strategies.opaque_gemm_ratio)
            * (
                intermediate * width
                + model.is_gated * np.where(_has_five_gemms(model), 0.0, last_gemm_output)
            ),
            dropped=dropped,
            recomputed=dropped,
        ),
        network_input=present * norm_input,
        drops_network_input=strategies.recompute_mlp,
        gradients=(1.0 + model.is_gated) * intermediate * width,
        later=0.0,
    )


def _moe(
    model: ModelShape,
    strategies: Strategies,
    local_tokens: Numbers,
    mixer: _Mix,
    *,
    last_gemm_output: Numbers,
    keeps_exchanged: Numbers,
    scored_bytes: Numbers,
    keeps_activations: Numbers,
) -> _Layer:
    width = strategies.element_bytes
    sent = local_tokens * model.top_k
    rows = np.maximum(buffer_rows(model, strategies), strategies.expert_imbalance_p99)
    received = sent * strategies.expert_tensor * rows
    linear = _linear_bytes(strategies)
    copies = received * model.expert_hidden
    intermediate = received * model.moe_ffn / strategies.expert_tensor
    gates = (1.0 + model.is_gated) * width
    trains = keeps_input(strategies, strategies.adapts_experts)
    kept_gates = gates + keeps_activations * model.is_gated * width
    routed = copies * linear * trains + intermediate * (kept_gates + linear * trains)
    returned = sent * model.expert_hidden
    routed = routed + _scored(strategies, copies, returned, scored_bytes)
    rank = strategies.adapts_experts * strategies.adapter_rank * received * width
    routed = routed + 2.0 * rank
    router = local_tokens * model.router_outputs * SCORE_BYTES + sent * INDEX_BYTES
    kept = keeps_input(strategies, strategies.adapts_down) * linear
    shared_rows = strategies.tokens * model.shared_ffn / strategies.tensor
    shared = shared_rows * (kept_gates + kept)
    router = router + local_tokens * model.moe_latent * (width + linear)
    recompute_whole = strategies.recompute_moe
    recompute_routed = np.maximum(recompute_whole, strategies.chunks > 1.0)
    dropped_routed = recompute_routed * routed + (1.0 - recompute_routed) * (
        strategies.recompute_moe_act * intermediate * linear * trains
    )
    dropped_others = recompute_whole * router + shared * np.maximum(
        recompute_whole, strategies.recompute_shared_experts
    )
    at_once = 1.0 / strategies.chunks
    # DeepEP returns a token once from each rank and then its sum: about a copy of each.
    back = np.where(_scores_at_expert(strategies), 0.0, returned)
    exchanged = np.where(np.greater(strategies.expert, 1.0), (copies + back) * width, 0.0)
    has_last = _has_five_gemms(model) & np.greater(model.shared_ffn, 0.0)
    gemms = shared_rows * width + has_last * last_gemm_output
    by_op_saved = (
        router + keeps_exchanged * exchanged + (1.0 - strategies.opaque_gemm_ratio) * gemms
    )
    return _Layer(
        mixer=mixer,
        network_ratio=1.0,
        network=_Part(
            whole=router + shared + routed,
            by_op_saved=by_op_saved,
            dropped=dropped_routed + dropped_others,
            recomputed=dropped_routed * at_once + dropped_others,
        ),
        network_input=local_tokens
        * model.hidden
        * width
        * keeps_input(strategies, strategies.adapts_gate, strategies.adapts_up),
        drops_network_input=0.0,
        gradients=(gates * intermediate + (copies + returned) * width) * at_once,
        later=routed * (1.0 - at_once),
    )


def _scored(
    strategies: Strategies, copies: Numbers, returned: Numbers, scored_bytes: Numbers
) -> Numbers:
    """Bytes of the copies that are kept to multiply them by their scores.

    Their own rank does it in a wide type, or the expert's rank under DeepEP in the copies' type.
    """
    own_bytes = np.where(np.greater(scored_bytes, 0.0), strategies.element_bytes, 0.0)
    return np.where(_scores_at_expert(strategies), copies * own_bytes, returned * scored_bytes)


def _scores_at_expert(strategies: Strategies) -> npt.NDArray[np.bool_]:
    is_merged: npt.NDArray[np.bool_] = np.greater(strategies.is_deepep + strategies.is_hybridep, 0)
    return is_merged
