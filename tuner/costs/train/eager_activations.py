"""Bytes that a layer of Transformers' modules keeps in eager mode, and what PEFT's adapters add.

Per token of a layer, with R bytes of the hidden stream (2, or 4 where unquantised weights are
fp32), I of a network's intermediate values (2, or R under QLoRA: a 4-bit layer returns its input's
type), X of what an adapter keeps of its input (4 for fp32 adapters, 2 under autocast) and t = 1
where all weights are trained:

    norm            4 h + t R h         fp32 input; normed input, for the norm's weight
    q, k norm       4 (a + g) d + 2 t (a + g) d      where there is one
    linear inputs   t 2 h each          norms' outputs; of every GEMM its own cast under autocast
    attention       2 (2 a + 2 g) d + 4 a            q, k, v, output, log-sum-exp
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

Source: Transformers 5.17 (models/llama, integrations/moe.py), PEFT 0.21.2 (tuners/lora/layer.py),
PyTorch 2.11; counted by saved-tensor hooks on one H200 (examples/profiles/h200-lora).
Not covered: tensor, context and expert parallelism, attention without a fused kernel, experts one
by one.
"""

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from tuner.config.columns import Numbers, Strategies
from tuner.costs.train.activations import ActivationBytes, LayerBytes
from tuner.costs.train.adapters import (
    AdaptedMatrix,
    adapter_counts,
    attention_matrices,
    keeps_input,
    network_matrices,
)
from tuner.costs.train.shapes import ModelShape
from tuner.costs.train.state import padded_vocab

HALF = 2.0
SINGLE = 4.0

COPY_INDEX_BYTES = 35.0
"""Of a routed copy: three 64-bit indices and one of top-k, two masks of a byte, a bf16 weight."""

LOSS_KEEPS = 4.0
"""Of a logit, from forward to backward."""


class _Widths(NamedTuple):
    """Bytes of an element."""

    stream: Numbers
    inner: Numbers
    adapter_input: Numbers
    adapter_shares: Numbers
    """1 where an adapter keeps what its frozen layer reads, and no copy of its own."""
    own_casts: Numbers
    """1 where every linear layer casts its input for itself."""


class _Part(NamedTuple):
    """One part of a layer, in bytes."""

    saved: Numbers
    gradients: Numbers = 0.0
    """Added while its backward pass runs."""
    late: Numbers = 0.0
    """Of both, at the end of its backward pass."""


def eager_activation_bytes(model: ModelShape, s: Strategies) -> ActivationBytes:
    """Count what one layer of each kind keeps."""
    tokens, widths = s.tokens, _widths(s)
    hidden = tokens * model.hidden * widths.stream
    mixer = _attention(model, s, widths)
    dense = _layer(s, hidden, mixer, _dense(model, s, widths))
    moe = _layer(s, hidden, mixer, _moe(model, s, widths))
    head_inputs = s.is_full * tokens * model.hidden * (widths.stream + HALF)
    return ActivationBytes(
        dense=dense,
        moe=moe,
        embedding=-(1.0 - s.recompute_full) * _not_kept_first(model, s, widths, mixer),
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


def _not_kept_first(model: ModelShape, s: Strategies, widths: _Widths, mixer: _Part) -> Numbers:
    """What the first layer does not keep, since nothing below its first adapter has a gradient.

    Without adapters in attention that is attention, the router and the weights of gate and up.
    """
    norm = s.tokens * SINGLE * model.hidden
    is_mixer = keeps_input(
        s, s.adapts_q, s.adapts_k, s.adapts_v, s.adapts_o, s.adapts_q_down, s.adapts_kv_down
    )
    gates = (1.0 + model.is_gated) * model.expert_hidden * model.moe_ffn
    merged = s.adapts_experts * HALF * model.experts * gates
    outputs = HALF * s.tokens * model.top_k * model.expert_hidden
    has_experts = np.greater(model.moe_layers, 0.0) & np.less_equal(model.dense_layers, 0.0)
    below = mixer.saved + norm + np.where(has_experts, merged + outputs, 0.0)
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


def _layer(s: Strategies, hidden: Numbers, mixer: _Part, network: _Part) -> LayerBytes:
    whole = mixer.saved + network.saved
    full = s.recompute_full
    return LayerBytes(
        saved=(1.0 - full) * whole + full * hidden,
        recomputed=np.where(np.greater(full, 0.0), whole, 0.0),
        gradients=network.gradients + 2.0 * hidden,
        late=mixer.saved + network.late + 2.0 * hidden,
    )


def _norm(s: Strategies, widths: _Widths, width: Numbers) -> Numbers:
    return width * (SINGLE + s.is_full * widths.stream)


def _adapters(s: Strategies, widths: _Widths, matrices: tuple[AdaptedMatrix, ...]) -> Numbers:
    """Per token: what adapters keep of their inputs and of their inner width."""
    total: Numbers = 0.0
    for one in matrices:
        kept = (1.0 - widths.adapter_shares) * widths.adapter_input * one.inputs
        total = total + one.ratio * (kept + widths.adapter_input * s.adapter_rank)
    return total


def _cast_weights(s: Strategies, trained: Numbers, frozen: Numbers) -> Numbers:
    """Under autocast: bf16 copies of fp32 adapters, or of fp32 weights that are trained."""
    wide = s.is_full * np.where(np.greater(s.weight_bytes, HALF), frozen, 0.0)
    narrow = np.where(np.greater(s.adapter_bytes, HALF), trained, 0.0)
    return np.where(np.greater(s.autocast, 0.0), HALF * (wide + narrow), 0.0)


def _inputs(s: Strategies, widths: _Widths, width: Numbers, readers: Numbers) -> Numbers:
    """Per token: what frozen or trained layers keep of an input that several read."""
    casts = np.where(np.greater(widths.own_casts, 0.0), readers, 1.0)
    return s.is_full * HALF * width * casts


def _shared(s: Strategies, widths: _Widths, width: Numbers, *adapts: Numbers) -> Numbers:
    """Per token: an input that bf16 adapters share with their layers."""
    is_kept = keeps_input(s, *adapts) * (1.0 - s.is_full)
    return widths.adapter_shares * is_kept * HALF * width


def _attention(model: ModelShape, s: Strategies, widths: _Widths) -> _Part:
    queries, kept = model.heads * model.head_dim, model.kv_heads * model.head_dim
    heads = queries + model.heads * model.value_dim
    key_values = model.kv_heads * (model.head_dim + model.value_dim)
    matrices = attention_matrices(model, s)
    trained, hidden = adapter_counts(model, s).attention, model.hidden
    saved = s.tokens * (
        _norm(s, widths, hidden)
        + model.has_qk_norm * _norm(s, widths, queries + kept)
        + _inputs(s, widths, hidden, 3.0)
        + _shared(s, widths, hidden, s.adapts_q, s.adapts_k, s.adapts_v)
        + HALF * (heads + key_values)
        + SINGLE * model.heads
        + _adapters(s, widths, matrices)
    )
    frozen = hidden * (2.0 * queries + 2.0 * kept)
    # Attention's output is in bf16 already, so under QLoRA o_proj's adapter needs no cast.
    reused = np.where(np.greater(widths.inner, HALF), s.adapts_o * queries * HALF, 0.0)
    return _Part(saved=saved - s.tokens * reused + _cast_weights(s, trained, frozen))


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
