"""Bytes that a layer of Transformers' modules keeps in eager mode, and what PEFT's adapters add.

Per token of a layer, with R bytes of the hidden stream (2, or 4 where unquantised weights are
fp32), I of a network's intermediate values (2, or R under QLoRA: a 4-bit layer returns its input's
type), X of what an adapter keeps of its input (4 for fp32 adapters, 2 under autocast) and t = 1
where all weights are trained:

    norm            4 h + t R h         fp32 input; normed input, for the norm's weight
    q, k norm       4 (a + g) d + 2 t (a + g) d      where there is one
    linear inputs   t 2 h each          norms' outputs; of every GEMM its own cast under autocast
    attention       2 (2 a + 2 g) d + 4 a            q, k, v, output, log-sum-exp
    output gate     2 a d + 2 (t) a d                the gate; the product, where o_proj reads it
    latent heads    2 a (2 d + n + 2 v) + 4 a        q, k, keys and values as projected, output,
                                                     log-sum-exp; both low ranks have a norm
    gated delta     4 c + 4 K N + 2 H Q + 14 H P     the convolution's input and output, normed q
                                                     and k, triangles of a chunk, gated norm
    KDA             4 c + 17 H N + 4 H Q + 12 H P    the same, and fp32 decays of every channel
    Mamba-2         2 w + 2 H P                      what is projected, and the scan's output
    dense network   3 I F + t 2 F       gate, silu(gate), up; their product
    adapter         X i + 2 or 4 r      of its own input: an fp32 adapter casts it for itself, so
                                        nothing is shared between q, k and v, or gate and up; bf16
                                        adapters share what the frozen layer reads
    router          t 2 h + 4 E + 35 k  its input, fp32 probabilities, indices and masks of copies
    experts, k x    2 (2 f + f + h)     gate and up, silu(gate), output (for the router's gradient)
                    2 (h + f)           their inputs, where experts or their adapters are trained

and per layer, whatever the tokens, with adapters on stacked experts 2 E (2 f h + f h): PEFT builds
W + B A at full size in every forward pass, and autograd keeps it. Casts of fp32 adapters to bf16,
and of fp32 weights under autocast, are kept too.

The loss keeps fp32 log-probabilities, 4 V. At the peak of its backward pass their gradient exists
twice, 8 V more.

With checkpointing R h are kept per layer, and the rest exists for one layer at a time. Gradients
exist from their layer's backward pass to the optimizer's step (`zero_grad` frees them), so the peak
is the largest of: the loss; the first layer's backward pass; the last one's, beside all gradients.

Letters of latent attention: n of d without rotation, v of a value. Of linear attention: c channels
of the convolution, K key heads of N, H heads of P values, Q tokens of a chunk, w projected widths.
That is with the kernels of causal-conv1d, mamba_ssm and flash-linear-attention, whose saved tensors
stood in for them in the count: transformers 5.24, saved-tensor hooks on a CPU
(tests/tuner/costs/train/test_eager_mixers.py).

Source: Transformers 5.17 (models/llama, integrations/moe.py), PEFT 0.21.2 (tuners/lora/layer.py),
PyTorch 2.11; counted by saved-tensor hooks on one H200 (examples/profiles/h200-lora).
Not covered: tensor, context and expert parallelism, attention without a fused kernel, experts one
by one, temporaries of the backward pass of linear attention, and that norms of hybrids keep 2 h
more where all weights are trained.
"""

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import ModelShape
from tuner.costs.train.activations import ActivationBytes, LayerBytes
from tuner.costs.train.adapters import (
    AdaptedMatrix,
    adapter_counts,
    attention_matrices,
    keeps_input,
    linear_matrices,
    network_matrices,
)
from tuner.costs.train.state import attention_matrices as attention_weights
from tuner.costs.train.state import linear_weights, padded_vocab

HALF = 2.0
SINGLE = 4.0

COPY_INDEX_BYTES = 35.0
"""Bytes of indices, masks and weight of a routed copy: three 64-bit indices and one of top-k, two
masks of a byte, a bf16 weight."""


class _Widths(NamedTuple):
    """Bytes of an element."""

    stream: Numbers
    inner: Numbers
    adapter_input: Numbers
    adapter_shares: Numbers
    """1 where an adapter keeps what its frozen layer reads, and no copy of its own."""
    own_casts: Numbers
    """1 where every linear layer casts its input for itself."""


class _Mixer(NamedTuple):
    """The mixers of a kind of layer."""

    saved: Numbers
    """Bytes kept on average over the mixers."""
    largest: Numbers
    """Bytes of the mixer that keeps most."""


class _Part(NamedTuple):
    """One part of a layer, in bytes."""

    saved: Numbers
    gradients: Numbers = 0.0
    """Bytes added while its backward pass runs."""
    late: Numbers = 0.0
    """Bytes of `saved` and `gradients` together that remain at the end of its backward pass."""


def eager_activation_bytes(model: ModelShape, s: Strategies) -> ActivationBytes:
    """Count what one layer of each kind keeps."""
    tokens, widths = s.tokens, _widths(s)
    hidden = tokens * model.hidden * widths.stream
    mixers = _attention(model, s, widths), _linear(model, s, widths)
    of_dense = _mix(mixers, shares=(model.dense_attention, model.dense_linear))
    of_moe = _mix(mixers, shares=(model.moe_attention, model.moe_linear))
    dense = _layer(s, hidden, of_dense, _scaled(model.dense_network, _dense(model, s, widths)))
    moe = _layer(s, hidden, of_moe, _moe(model, s, widths))
    first = np.where(np.greater(model.dense_layers, 0.0), of_dense.saved, of_moe.saved)
    head_inputs = s.is_full * tokens * model.hidden * (widths.stream + HALF)
    return ActivationBytes(
        dense=dense,
        moe=moe,
        embedding=-(1.0 - s.recompute_full) * _not_kept_first(model, s, first),
        norm=tokens * model.hidden * SINGLE + head_inputs + _head_copy(model, s),
        logit=tokens * padded_vocab(model, s),
        head_gradient=hidden,
        boundary=hidden,
    )


def chosen_layers(
    s: Strategies, eager: ActivationBytes, others: ActivationBytes
) -> ActivationBytes:
    """Pick per column: eager modules, or the others'."""
    is_eager = np.greater(s.eager_modules, 0.0)
    picked: dict[str, Any] = {
        field.name: np.where(is_eager, getattr(eager, field.name), getattr(others, field.name))
        for field in fields(ActivationBytes)
        if field.name not in ("dense", "moe")
    }
    layers: dict[str, Any] = {
        kind: LayerBytes(
            **{
                field.name: np.where(
                    is_eager,
                    getattr(getattr(eager, kind), field.name),
                    getattr(getattr(others, kind), field.name),
                )
                for field in fields(LayerBytes)
            }
        )
        for kind in ("dense", "moe")
    }
    return ActivationBytes(**layers, **picked)


def _not_kept_first(model: ModelShape, s: Strategies, mixer: Numbers) -> Numbers:
    """Return the bytes that the first layer does not keep.

    Nothing below its first adapter has a gradient.

    Without adapters in attention that is attention, the router and the weights of gate and up.
    """
    norm = s.tokens * SINGLE * model.hidden
    softmax = (s.adapts_q, s.adapts_k, s.adapts_v, s.adapts_o, s.adapts_q_down, s.adapts_kv_down)
    linear = (s.linear_adapters, s.linear_rank_adapters, s.adapts_linear_out)
    is_mixer = keeps_input(s, *softmax, *linear)
    gates = (1.0 + model.is_gated) * model.expert_hidden * model.moe_ffn
    merged = s.adapts_experts * HALF * model.experts * gates
    outputs = HALF * s.tokens * model.top_k * model.expert_hidden
    has_experts = np.greater(model.moe_layers, 0.0) & np.less_equal(model.dense_layers, 0.0)
    below = mixer + norm + np.where(has_experts, merged + outputs, 0.0)
    return (1.0 - s.is_full) * np.where(is_mixer > 0.0, norm, below)


def _widths(s: Strategies) -> _Widths:
    is_cast = np.greater(s.autocast, 0.0)
    upcast = np.greater(s.unquantised_bytes, HALF)
    is_wide = np.greater(s.is_full, 0.0) & np.greater(s.weight_bytes, HALF)
    stream = np.where(upcast | is_wide, SINGLE, HALF)
    is_single = np.greater(s.adapter_bytes, HALF)
    return _Widths(
        stream=stream,
        inner=np.where(upcast, SINGLE, HALF),
        adapter_input=np.where(is_single & ~is_cast, SINGLE, HALF),
        adapter_shares=np.where(is_single | is_cast, 0.0, 1.0),
        own_casts=np.where(is_cast & np.greater(stream, HALF), 1.0, 0.0),
    )


def _head_copy(model: ModelShape, s: Strategies) -> Numbers:
    """The head's weights in bf16, where they are fp32 under autocast."""
    is_wide = np.greater(_widths(s).stream, HALF) & np.greater(s.autocast, 0.0)
    return np.where(is_wide, HALF * model.hidden * padded_vocab(model, s), 0.0)


def _mix(mixers: tuple[Numbers, Numbers], *, shares: tuple[Numbers, Numbers]) -> _Mixer:
    """Average softmax and linear attention over the layers of a kind."""
    present = [np.greater(share, 0.0) * mixer for mixer, share in zip(mixers, shares, strict=True)]
    return _Mixer(saved=shares[0] * mixers[0] + shares[1] * mixers[1], largest=np.maximum(*present))


def _scaled(share: Numbers, part: _Part) -> _Part:
    """Scale a network's part to the share of the layers that have it."""
    return _Part(*(share * num_bytes for num_bytes in part))


def _layer(s: Strategies, hidden: Numbers, mixer: _Mixer, network: _Part) -> LayerBytes:
    full = s.recompute_full
    return LayerBytes(
        saved=(1.0 - full) * (mixer.saved + network.saved) + full * hidden,
        recomputed=np.where(np.greater(full, 0.0), mixer.largest + network.saved, 0.0),
        gradients=network.gradients + 2.0 * hidden,
        late=mixer.largest + network.late + 2.0 * hidden,
    )


def _norm(s: Strategies, widths: _Widths, width: Numbers) -> Numbers:
    return width * (SINGLE + s.is_full * widths.stream)


def _adapters(s: Strategies, widths: _Widths, matrices: tuple[AdaptedMatrix, ...]) -> Numbers:
    """Return bytes a token that adapters keep of their inputs and of their inner width."""
    total: Numbers = 0.0
    for matrix in matrices:
        kept = (1.0 - widths.adapter_shares) * widths.adapter_input * matrix.inputs
        total = total + matrix.ratio * (kept + widths.adapter_input * s.adapter_rank)
    return total


def _cast_weights(s: Strategies, trained: Numbers, frozen: Numbers) -> Numbers:
    """Return the bytes of bf16 copies under autocast.

    It casts fp32 adapters, or fp32 weights that are trained.
    """
    wide = s.is_full * np.where(np.greater(s.weight_bytes, HALF), frozen, 0.0)
    narrow = np.where(np.greater(s.adapter_bytes, HALF), trained, 0.0)
    return np.where(np.greater(s.autocast, 0.0), HALF * (wide + narrow), 0.0)


def _inputs(s: Strategies, widths: _Widths, width: Numbers, readers: Numbers) -> Numbers:
    """Return bytes a token that frozen or trained layers keep of an input that several read."""
    casts = np.where(np.greater(widths.own_casts, 0.0), readers, 1.0)
    return s.is_full * HALF * width * casts


def _shared(s: Strategies, widths: _Widths, width: Numbers, *adapts: Numbers) -> Numbers:
    """Return bytes a token of an input that bf16 adapters share with their layers."""
    is_kept = keeps_input(s, *adapts) * (1.0 - s.is_full)
    return widths.adapter_shares * is_kept * HALF * width


def _attention(model: ModelShape, s: Strategies, widths: _Widths) -> Numbers:
    queries, kept = model.heads * model.head_dim, model.kv_heads * model.head_dim
    outputs = model.heads * model.value_dim
    key_values = model.kv_heads * (model.head_dim + model.value_dim)
    matrices = attention_matrices(model, s)
    trained, hidden = adapter_counts(model, s).attention, model.hidden
    is_mla = np.greater(model.is_mla, 0.0)
    # What reads the hidden state, and what the up-projections of latent attention read instead.
    reads_q = np.where(is_mla & np.greater(model.q_lora_rank, 0.0), s.adapts_q_down, s.adapts_q)
    saved = s.tokens * (
        _norm(s, widths, hidden)
        + model.has_qk_norm * _norm(s, widths, queries + kept)
        + _inputs(s, widths, hidden, np.where(is_mla, 2.0, 3.0))
        + _shared(
            s,
            widths,
            hidden,
            reads_q,
            np.where(is_mla, s.adapts_kv_down, s.adapts_k),
            s.adapts_v,
        )
        + HALF * (queries + outputs + key_values)
        + SINGLE * model.heads
        + model.has_output_gate * _gate(s, widths, outputs)
        + model.is_mla * _low_ranks(model, s, widths)
        + _adapters(s, widths, matrices)
    )
    # Attention's output is in bf16 already, so under QLoRA o_proj's adapter needs no cast.
    reused = np.where(np.greater(widths.inner, HALF), s.adapts_o * outputs * HALF, 0.0)
    frozen = attention_weights(model, 1.0)
    return saved - s.tokens * reused + _cast_weights(s, trained, frozen)


def _gate(s: Strategies, widths: _Widths, outputs: Numbers) -> Numbers:
    """Return bytes a token of attention's output gate.

    The gated product counts, too, where its reader shares it.
    """
    return HALF * outputs * (1.0 + s.is_full) + _shared(s, widths, outputs, s.adapts_o)


def _low_ranks(model: ModelShape, s: Strategies, widths: _Widths) -> Numbers:
    """Return bytes a token of both low ranks.

    These are their norms, what reads them, and keys beside values in one tensor.
    """
    ranks = model.q_lora_rank + model.kv_lora_rank
    shared = _shared(s, widths, model.q_lora_rank, s.adapts_q)
    shared = shared + _shared(s, widths, model.kv_lora_rank, s.adapts_k)
    beside = HALF * model.heads * (model.head_dim - model.rope_dim)
    return _norm(s, widths, ranks) + _inputs(s, widths, ranks, 1.0) + shared + beside


def _linear(model: ModelShape, s: Strategies, widths: _Widths) -> Numbers:
    if not model.has_linear:
        return 0.0
    hidden, values = model.hidden, model.linear_values
    keys = model.linear_key_heads * model.linear_key_dim
    chunk = model.linear_heads * model.linear_chunk
    mamba = HALF * (model.linear_inputs + values)
    delta = 2.0 * HALF * (model.linear_conv + keys) + HALF * chunk + 14.0 * values
    kda = delta + 13.0 * keys + HALF * chunk - 2.0 * values
    kernel = np.where(
        np.greater(model.linear_decays_channels, 0.0),
        kda,
        np.where(np.greater(model.linear_is_delta, 0.0), delta, mamba),
    )
    return s.tokens * (
        _norm(s, widths, hidden)
        + _inputs(s, widths, hidden, 1.0)
        + _shared(s, widths, hidden, np.minimum(s.linear_adapters, 1.0))
        + kernel
        + model.linear_is_delta
        * (s.is_full * HALF * values + _shared(s, widths, values, s.adapts_linear_out))
        + _adapters(s, widths, linear_matrices(model, s))
    ) + _cast_weights(s, adapter_counts(model, s).linear, linear_weights(model, 1.0))


def _dense(model: ModelShape, s: Strategies, widths: _Widths) -> _Part:
    hidden, ffn = model.hidden, model.dense_ffn
    matrices, gates = network_matrices(model, s, ffn), 1.0 + model.is_gated
    per_token = (
        _norm(s, widths, hidden)
        + _inputs(s, widths, hidden, gates)
        + _shared(s, widths, hidden, s.adapts_gate, s.adapts_up)
        + widths.inner * ffn * (1.0 + 2.0 * model.is_gated)
        + s.is_full * HALF * ffn
        + _shared(s, widths, ffn, s.adapts_down)
        + _adapters(s, widths, matrices)
    )
    weights = (gates + 1.0) * hidden * ffn
    trained = adapter_counts(model, s).dense
    widest = np.where(
        np.greater(s.adapter_rank * s.adapts_down, 0.0), s.adapter_bytes, widths.inner
    )
    gradients = s.tokens * ffn * (2.0 * widths.inner + widest)
    return _Part(
        saved=s.tokens * per_token + _cast_weights(s, trained, weights),
        gradients=gradients,
        late=s.tokens * ffn * widths.inner * 2.0,
    )


def _moe(model: ModelShape, s: Strategies, widths: _Widths) -> _Part:
    hidden, width, ffn = model.hidden, model.expert_hidden, model.moe_ffn
    gates, trains = 1.0 + model.is_gated, keeps_input(s, s.adapts_experts)
    copies = s.tokens * model.top_k
    shared = network_matrices(model, s, model.shared_ffn)
    per_token = (
        _norm(s, widths, hidden)
        + _inputs(s, widths, hidden, 1.0)
        + SINGLE * model.router_outputs
        + COPY_INDEX_BYTES * model.top_k
        + widths.inner * model.shared_ffn * (1.0 + 2.0 * model.is_gated)
        + s.is_full * HALF * model.shared_ffn
        + np.greater(model.shared_ffn, 0.0) * _adapters(s, widths, shared)
    )
    per_copy = HALF * ((gates + 1.0) * ffn + width + trains * (width + ffn))
    merged = s.adapts_experts * HALF * model.experts * (gates + 1.0) * width * ffn
    counts = adapter_counts(model, s)
    casts = np.where(np.greater(s.adapter_bytes, HALF), HALF * counts.experts, 0.0)
    gradient = s.adapts_experts * HALF * model.experts * width * ffn
    return _Part(
        saved=s.tokens * per_token + copies * per_copy + merged + casts,
        gradients=gradient + copies * HALF * 2.0 * width,
        late=copies * HALF * (2.0 * width + gates * ffn) + gates * gradient,
    )
