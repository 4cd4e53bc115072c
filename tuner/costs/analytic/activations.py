"""Bytes that one layer keeps for its backward pass, per micro-batch, on one rank.

Of n = N / T tokens of this rank (N of its tensor group; n = N without sequence parallelism), R
routed copies that it receives, D bytes an element:

    residuals     2 n h D                    inputs of both norms
    norm outputs  2 n h D                    inputs of attention and of the network behind it
    attention     N (a + g) (d + v) D / T    q, k, v and the core's output
    flash         4 N a / T                  log-sum-exp
    MLA           n (2 r_q + 2 r_kv + rope) D   low ranks before and after their norms, on top
    dense FFN     3 N F D / T                gate and up, their product; 2 N F D / T ungated
    router        4 n E + 8 n k              fp32 probabilities, the map of copies
    shared        3 N F_s D / T
    experts       R (h + 3 F_e / ETP) D      a copy, gate and up, their product
    no flash      N a s (2 + 3 dropout) / T   softmax; its mask and output under dropout (D = 2)
    dropout       2 N h                      masks of both residual branches, one byte each

and of the ends 2 n h D for the last norm and N V / T logits. R is n k ETP times the load of the
busiest rank in one of a hundred passes. A module that is computed again keeps its input alone:

    core_attention    drops softmax, masks and log-sum-exp     layernorm      drops norm outputs
    mlp               drops the dense network and its input    moe_act        drops the product
    moe, chunks > 1   drops router, shared and experts         shared_experts drops them
    mla_up_proj       drops q, k, v                            full           keeps 2 n h alone

What is dropped comes back, one layer at a time, during its backward pass: `again`.

Letters as in state.py. Sources: Korthikanti et al., arXiv 2205.05198, section 4 (34 s b h + 5 a s^2
b); FlashAttention, arXiv 2205.14135 (log-sum-exp in place of the scores); Megatron-LM's MoE layer,
which multiplies by the router's weights inside the experts; MemFine, arXiv 2511.21431 (chunks).
Not covered: fp8 copies of saved inputs, capacity limits, attention sinks.
"""

from dataclasses import dataclass

import numpy as np

from tuner.costs.analytic.shapes import ModelShape, Numbers, Strategies
from tuner.costs.analytic.state import padded_vocab

SCORE_BYTES = 4.0
"""Log-sum-exp, norm scales and router probabilities are fp32."""

MAP_BYTES = 8.0
"""Per routed copy: where it went, a 64-bit index."""

MASK_BYTES = 1.0
"""A dropout mask."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerBytes:
    """Bytes of one layer and micro-batch."""

    saved: Numbers
    """Kept from forward to backward."""
    again: Numbers
    """Held on top while this layer is computed again."""
    gradients: Numbers
    """Held on top while its largest network passes gradients back."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActivationBytes:
    """Bytes per micro-batch of every kind of layer."""

    dense: LayerBytes
    moe: LayerBytes
    embedding: Numbers
    norm: Numbers
    """The last norm and its output."""
    logit: Numbers
    """One byte of every logit."""
    head_gradient: Numbers
    """Gradient of the head's input; with sequence parallelism that input gathered from the tensor
    group, its whole gradient and the own part of it."""
    boundary: Numbers
    """Between two stages."""


def activation_bytes(
    model: ModelShape, strategies: Strategies, *, exchanged_ratio: Numbers
) -> ActivationBytes:
    """Count what one layer of each kind keeps.

    Under context parallelism `exchanged_ratio` of attention's output is kept a second time, as it
    lay before the exchange that gives every rank its own tokens back.
    """
    width = strategies.element_bytes
    group = strategies.tokens
    own = group / np.where(np.asarray(strategies.sequence_parallel) > 0.0, strategies.tensor, 1.0)
    hidden = own * model.hidden * width
    whole = group * model.hidden * width
    attention = _attention(model, strategies, own, exchanged_ratio)
    return ActivationBytes(
        dense=_layer(strategies, hidden, own, _dense(model, strategies, attention)),
        moe=_layer(strategies, hidden, own, _moe(model, strategies, own, attention)),
        embedding=strategies.dropout * own * model.hidden * MASK_BYTES,
        norm=2.0 * hidden + SCORE_BYTES * own,
        logit=group * padded_vocab(model, strategies) / strategies.tensor,
        head_gradient=np.where(own < group, 2.0 * whole + hidden, hidden),
        boundary=hidden,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """One part of a layer, in bytes."""

    whole: Numbers
    """Kept where nothing is computed again."""
    dropped: Numbers
    """Not kept, by the modules that are computed again."""
    again: Numbers
    """Of `dropped`, held at once when it comes back."""


def _layer(strategies: Strategies, hidden: Numbers, own: Numbers, parts: "_Layer") -> LayerBytes:
    masks = 2.0 * strategies.dropout * hidden / strategies.element_bytes * MASK_BYTES
    scales = 2.0 * SCORE_BYTES * own
    attention, network = parts.attention, parts.network
    whole = 4.0 * hidden + scales + masks + attention.whole + network.whole
    drops_norms = strategies.recompute_layernorm + np.maximum(
        strategies.recompute_layernorm, parts.drops_network_input
    )
    dropped = drops_norms * hidden + attention.dropped + network.dropped
    full = strategies.recompute_full
    everything = whole - hidden - parts.later
    return LayerBytes(
        saved=(1.0 - full) * (whole - dropped) + full * hidden,
        again=np.where(full > 0.0, everything, np.maximum(attention.again, network.again)),
        gradients=parts.gradients + hidden,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """What makes up a layer beside its residuals and norms."""

    attention: _Part
    network: _Part
    gradients: Numbers
    drops_network_input: Numbers
    later: Numbers
    """Of the network, chunks that come back after others are gone."""


def _attention(
    model: ModelShape, strategies: Strategies, own: Numbers, exchanged_ratio: Numbers
) -> _Part:
    width = strategies.element_bytes
    tokens = strategies.tokens / strategies.tensor
    key_heads = np.where(np.asarray(model.is_mla) > 0.0, model.heads, model.kv_heads)
    projected = model.heads * model.head_dim + key_heads * (model.head_dim + model.value_dim)
    projected = tokens * projected * width
    output = tokens * model.heads * model.value_dim * width
    low_ranks = 2.0 * (model.q_lora_rank + model.kv_lora_rank) + model.rope_dim
    low_ranks = model.is_mla * own * low_ranks * width
    flash = strategies.has_flash_attention
    scores = tokens * model.heads * SCORE_BYTES * flash
    square = tokens * model.heads * strategies.sequence
    scores = scores + (1.0 - flash) * square * (width + strategies.dropout * (width + MASK_BYTES))
    exchanged = np.where(np.asarray(strategies.context) > 1.0, exchanged_ratio, 0.0) * output
    dropped = (
        strategies.recompute_core_attention * scores
        + strategies.recompute_mla_up_proj * model.is_mla * projected
    )
    whole = projected + output + exchanged + low_ranks + scores
    return _Part(whole=whole, dropped=dropped, again=dropped)


def _dense(model: ModelShape, strategies: Strategies, attention: _Part) -> _Layer:
    product = strategies.tokens * model.dense_ffn / strategies.tensor * strategies.element_bytes
    whole = (2.0 + model.is_gated) * product
    dropped = strategies.recompute_mlp * whole
    return _Layer(
        attention=attention,
        network=_Part(whole=whole, dropped=dropped, again=dropped),
        gradients=(1.0 + model.is_gated) * product,
        drops_network_input=strategies.recompute_mlp,
        later=0.0,
    )


def _moe(model: ModelShape, strategies: Strategies, own: Numbers, attention: _Part) -> _Layer:
    width = strategies.element_bytes
    sent = own * model.top_k
    received = sent * strategies.expert_tensor * strategies.busiest_ratio_p99
    copies = received * model.hidden * width
    product = received * model.moe_ffn / strategies.expert_tensor * width
    routed = copies + (2.0 + model.is_gated) * product
    router = own * model.experts * SCORE_BYTES + sent * MAP_BYTES
    shared = (2.0 + model.is_gated) * model.shared_ffn / strategies.tensor
    shared = strategies.tokens * shared * width
    whole_again = strategies.recompute_moe
    routed_again = np.maximum(whole_again, strategies.chunks > 1.0)
    dropped_routed = routed_again * routed + (1.0 - routed_again) * (
        strategies.recompute_moe_act * product
    )
    dropped_others = whole_again * router + shared * np.maximum(
        whole_again, strategies.recompute_shared_experts
    )
    at_once = 1.0 / strategies.chunks
    return _Layer(
        attention=attention,
        network=_Part(
            whole=router + shared + routed,
            dropped=dropped_routed + dropped_others,
            again=dropped_routed * at_once + dropped_others,
        ),
        gradients=((1.0 + model.is_gated) * product + copies + sent * model.hidden * width)
        * at_once,
        drops_network_input=0.0,
        later=routed * (1.0 - at_once),
    )
