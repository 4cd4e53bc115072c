"""Seconds of a layer of Transformers' modules in eager mode, and of PEFT's adapters.

Every operation is a kernel of its own that reads and writes memory, launched from Python. Bytes a
token moves and kernels a forward pass launches, counted by a dispatch mode over one layer of
Transformers 5.17 (models/llama, olmoe, qwen3_moe) under PEFT 0.21.2:

                    forward             backward                kernels
    norm            36 h                91 h, 8 h for its       8
                                        weight's gradient
    residual        6 h                 8 h                     1
    rotary          20 (a + g) d        32 (a + g) d            11, attention's core among them
    q or k norm     36                  92                      8
    output gate     10 a d              16 a d                  3
    latent heads    10 a n + 32 a p     40 a n + 82 a p + 8 a v     18, attention's core among them
    gated delta     8 c + 70 H P        8 c + 140 H P           30
    KDA             8 c + 118 H P       8 c + 210 H P           30
    gated network   10 F                18 F                    2 (3 GEMMs)
    router          17 E + 330 k        29 E + 260 k            35 of an MoE layer in all
    copies          20 k h + 18 k f     36 k h + 34 k f
    nf4 matrix      2.52 bytes a weight, in either pass         6
    loss            20 V                20 V                    32 of embedding, norm and head

Latent attention has n widths of a head without rotation, p with it, v of a value, and a norm of
each low rank; linear attention c channels of its convolution and H P values. Those four rows were
counted over transformers 5.24 on a CPU (deepseek_v3, qwen3_next, kimi_linear), without what kernels
of causal-conv1d and flash-linear-attention do: the convolution reads and writes 4 c, and a scan is
priced as such. Mamba-2 is one kernel of mamba_ssm between its projections. Without these packages
Transformers runs PyTorch's operations, which is not priced: examples/finetuning/finetune.py stops.

Adapters: adapter_blocks.py. On stacked experts W + B A is built in every forward pass: a copy of W
(4 bytes a weight) and a GEMM of the rank's depth that adds to it (reads 2, writes 2). The gradient
of W is written at full size, and two GEMMs reduce it to those of A and B. Frozen matrices have no
weight gradients.

A processor runs the gathers, scatters and masks of routed copies one element after the other, some
ten times slower than their bytes: there they are priced as the profile measured such kernels. Of a
copy of width h in a network of width f: a gather and its scatter, the weighted sum, and masks of h,
2 f and h (integrations/moe.py, `grouped_mm_experts_forward`).

Not covered: tensor, context and expert parallelism; experts one by one; the first layer, part of
whose input gradients is not computed; that projections of linear attention are several GEMMs.
"""

from collections.abc import Iterable

import numpy as np

from tuner.config.columns import Numbers, Strategies
from tuner.costs.train.adapter_blocks import adapter_block, adapter_blocks
from tuner.costs.train.adapters import (
    AdaptedMatrix,
    attention_matrices,
    linear_matrices,
    network_matrices,
)
from tuner.costs.train.attention import attention_core
from tuner.costs.train.linear_attention import SCAN_LAUNCHES, scan_block
from tuner.costs.train.parts import (
    BACKWARD_BYTES,
    Block,
    BlockInputs,
    gemm,
    is_any,
    scale_block,
    select_block,
    trained,
)
from tuner.prices.ops import BF16, SKINNY, on_rows, trained_experts, trained_gemm

LOSS_BYTES = 20.0

_NORM = (36.0, 91.0)
_NORM_WEIGHT = 8.0
_RESIDUAL = (6.0, 8.0)
_HEADS = (20.0, 32.0)
_HEAD_NORM = (36.0, 92.0)
_OUTPUT_GATE = (10.0, 16.0)
_LATENT_PLAIN, _LATENT_ROTARY, _LATENT_VALUE = (10.0, 40.0), (32.0, 82.0), (0.0, 8.0)
_CHANNEL, _GATED_DELTA, _KDA = (8.0, 8.0), (70.0, 140.0), (118.0, 210.0)
_CONVOLUTION = 4.0
_MAMBA_VALUE = 6.0
"""Bytes of a value that Mamba-2's kernel moves for the gated norm; the convolution is besides."""
_NETWORK = (10.0, 18.0)
_COPY_HIDDEN, _COPY_INNER = (20.0, 36.0), (18.0, 34.0)
_EXPERT, _CHOICE = (17.0, 29.0), (330.0, 260.0)

_NORM_LAUNCHES = 8.0
_ROTARY_LAUNCHES = 11.0
_LATENT_LAUNCHES = 18.0
_GATE_LAUNCHES = 3.0
_DELTA_LAUNCHES = 30.0
_MOE_LAUNCHES = 35.0
_HEAD_LAUNCHES = 32.0
_NF4_LAUNCHES = 6.0
_MERGED_MOVED = 6.0
"""Bytes of a weight that building W + B A moves beside what its GEMM writes."""
_NF4_MOVED = 2.516
"""Bytes of a weight that is dequantised: 0.516 read, 2 written."""
CHECKPOINT_LAUNCHES = 0.45
"""Additional launches under checkpointing over those of a layer: a hook in Python for every saved
tensor."""


def eager_attention(setting: BlockInputs) -> Block:
    """Norm, projections, rotary embedding, attention, residual."""
    m, s = setting.model, setting.strategies
    heads = m.heads * m.head_dim + m.kv_heads * m.head_dim
    plain, latent = 1.0 - m.is_mla, m.is_mla * m.heads
    moved = _moved(
        setting,
        (_HEADS, plain * heads),
        (_RESIDUAL, m.hidden),
        (_OUTPUT_GATE, m.has_output_gate * m.heads * m.value_dim),
        (_LATENT_PLAIN, latent * (m.head_dim - m.rope_dim)),
        (_LATENT_ROTARY, latent * m.rope_dim),
        (_LATENT_VALUE, latent * m.value_dim),
    )
    normed, ranks = m.has_qk_norm * heads, m.is_mla * (m.q_lora_rank + m.kv_lora_rank)
    norms = _moved(setting, (_NORM, m.hidden + ranks), (_HEAD_NORM, normed))
    weights = s.is_full * _NORM_WEIGHT * s.tokens * (m.hidden + ranks + normed)
    num_ranks = m.is_mla * (1.0 + np.where(np.greater(m.q_lora_rank, 0.0), 1.0, 0.0))
    rotary = np.where(np.greater(m.is_mla, 0.0), _LATENT_LAUNCHES, _ROTARY_LAUNCHES)
    more = Block(
        backward_s=setting.memory_bound_s(weights),
        launches=_NORM_LAUNCHES * (1.0 + 2.0 * m.has_qk_norm + num_ranks)
        + rotary
        + _GATE_LAUNCHES * m.has_output_gate
        + 1.0,
    )
    projections = _linears(setting, attention_matrices(m, s))
    return _hooked(s, projections + attention_core(setting, launches=0.0) + moved + norms + more)


def eager_linear(setting: BlockInputs) -> Block:
    """Norm, projections, convolution, scan, gated norm, residual."""
    m, s = setting.model, setting.strategies
    delta = m.linear_is_delta
    of_value = m.linear_decays_channels
    moved = _moved(
        setting,
        (_NORM, m.hidden),
        (_RESIDUAL, m.hidden),
        (_CHANNEL, delta * m.linear_conv),
        (_GATED_DELTA, delta * (1.0 - of_value) * m.linear_values),
        (_KDA, delta * of_value * m.linear_values),
    )
    kernels = _CONVOLUTION * m.linear_conv + (1.0 - delta) * _MAMBA_VALUE * m.linear_values
    kernels_s = setting.memory_bound_s(s.tokens * kernels)
    weights = s.is_full * _NORM_WEIGHT * s.tokens * m.hidden
    more = Block(
        forward_s=kernels_s,
        backward_s=BACKWARD_BYTES * kernels_s + setting.memory_bound_s(weights),
        launches=_NORM_LAUNCHES + 1.0 + SCAN_LAUNCHES + delta * _DELTA_LAUNCHES,
    )
    has_rank = np.where(np.greater(m.linear_rank, 0.0), 1.0, 0.0)
    frozen = (
        AdaptedMatrix(ratio=0.0, inputs=m.hidden, outputs=m.linear_inputs),
        AdaptedMatrix(
            ratio=0.0,
            inputs=np.maximum(m.linear_rank, 1.0),
            outputs=np.maximum(m.linear_rank_outputs, 1.0),
            present=has_rank,
        ),
        AdaptedMatrix(ratio=0.0, inputs=m.linear_values, outputs=m.hidden),
    )
    block = scan_block(setting) + moved + more
    for matrix in frozen:
        block = block + _frozen_or_trained(setting, matrix)
    return _hooked(s, block + adapter_blocks(setting, linear_matrices(m, s)))


def eager_dense(setting: BlockInputs) -> Block:
    """Norm, network, residual."""
    m, s = setting.model, setting.strategies
    return _hooked(s, _network(setting, m.dense_ffn) + _outer(setting))


def eager_moe(setting: BlockInputs) -> tuple[Block, Block]:
    """Norm, router, shared experts; and routed experts."""
    m, s = setting.model, setting.strategies
    router = gemm(setting, s.tokens, m.router_outputs, m.hidden, dtype=BF16)
    chosen = _moved(setting, (_EXPERT, m.router_outputs), (_CHOICE, m.top_k))
    fixed = router + chosen + _outer(setting)
    fixed = fixed + Block(launches=_MOE_LAUNCHES - _NORM_LAUNCHES - 1.0)
    if is_any(m.shared_ffn):
        fixed = fixed + _network(setting, m.shared_ffn)
    if is_any(m.moe_latent):
        fixed = fixed + _latent_projections(setting)
    return _hooked(s, fixed), _hooked(s, _experts(setting))


def _latent_projections(setting: BlockInputs) -> Block:
    """Price the projections to the width that routed experts read, and back."""
    m = setting.model
    present, width = np.where(np.greater(m.moe_latent, 0.0), 1.0, 0.0), m.expert_hidden
    into = AdaptedMatrix(ratio=0.0, inputs=m.hidden, outputs=width, present=present)
    back = AdaptedMatrix(ratio=0.0, inputs=width, outputs=m.hidden, present=present)
    return _frozen_or_trained(setting, into) + _frozen_or_trained(setting, back)


def eager_head(setting: BlockInputs) -> Block:
    """Final norm, logits, loss."""
    m, s = setting.model, setting.strategies
    logits = gemm(setting, s.tokens, m.vocab, m.hidden, dtype=BF16)
    loss_s = setting.memory_bound_s(LOSS_BYTES * s.tokens * m.vocab)
    both = Block(forward_s=loss_s, backward_s=loss_s, launches=_HEAD_LAUNCHES)
    return logits + both + _moved(setting, (_NORM, m.hidden))


def _outer(setting: BlockInputs) -> Block:
    """Norm and residual of a network."""
    m, s = setting.model, setting.strategies
    weight_s = setting.memory_bound_s(s.is_full * _NORM_WEIGHT * s.tokens * m.hidden)
    more = Block(backward_s=weight_s, launches=_NORM_LAUNCHES + 1.0)
    return _moved(setting, (_NORM, m.hidden), (_RESIDUAL, m.hidden)) + more


def _network(setting: BlockInputs, width: Numbers) -> Block:
    linears = _linears(setting, network_matrices(setting.model, setting.strategies, width))
    return linears + _moved(setting, (_NETWORK, width)) + Block(launches=2.0)


def _moved(setting: BlockInputs, *parts: tuple[tuple[float, float], Numbers]) -> Block:
    """Element-wise kernels: forward and backward bytes of an element, and elements a token."""
    s = setting.strategies
    forward, backward = (sum(part[place] * width for part, width in parts) for place in (0, 1))
    return Block(
        forward_s=setting.memory_bound_s(s.tokens * forward),
        backward_s=setting.memory_bound_s(s.tokens * backward),
    )


def _linears(setting: BlockInputs, matrices: Iterable[AdaptedMatrix]) -> Block:
    block = Block()
    for matrix in matrices:
        block = block + _frozen_or_trained(setting, matrix) + adapter_block(setting, matrix)
    return block


def _frozen_or_trained(setting: BlockInputs, matrix: AdaptedMatrix) -> Block:
    s = setting.strategies
    gemms = gemm(setting, s.tokens, matrix.outputs, matrix.inputs)
    is_quantised = np.greater(s.frozen_bytes, 0.0) * matrix.present
    unpacked_s = setting.memory_bound_s(_NF4_MOVED * matrix.inputs * matrix.outputs)
    launches = 1.0 + is_quantised * _NF4_LAUNCHES
    return Block(
        forward_s=matrix.present * gemms.forward_s + is_quantised * unpacked_s,
        backward_s=matrix.present * gemms.backward_s + is_quantised * unpacked_s,
        weight_s=matrix.present * gemms.weight_s,
        launches=matrix.present * launches,
    )


def _experts(setting: BlockInputs) -> Block:
    m, s = setting.model, setting.strategies
    copies, inner = s.tokens * m.top_k, (1.0 + m.is_gated) * m.moe_ffn
    count = np.maximum(m.experts, 1.0)
    network = trained_experts(
        count, copies / count, hidden=m.expert_hidden, ffn=m.moe_ffn, inner=inner
    )
    trains = np.maximum(s.is_full, s.adapts_experts)
    gemms = trained(setting, network, trains=trains)
    slower = setting.constants.moe_memory_factor / setting.constants.memory_factor
    moved = _moved(
        setting,
        (_COPY_HIDDEN, slower * m.top_k * m.expert_hidden),
        (_COPY_INNER, slower * m.top_k * m.moe_ffn),
    )
    is_processor = np.greater(setting.hardware.is_processor, 0.0)
    if np.any(is_processor):
        moved = select_block(is_processor, _on_processor(setting, copies), moved)
    return gemms + moved + _merged(setting)


def _on_processor(setting: BlockInputs, copies: Numbers) -> Block:
    """Gathers, scatters and masks of routed copies, and the activation, on a processor."""
    m = setting.model
    masked = 2.0 * m.expert_hidden + (1.0 + m.is_gated) * m.moe_ffn
    hidden = m.expert_hidden
    kernels = (("permute", hidden), ("unpermute", hidden), ("masked_fill", masked))
    forward_s, backward_s = (
        sum(
            setting.prices.seconds(on_rows(kind, copies, width, is_backward=is_backward))
            for kind, width in kernels
        )
        for is_backward in (False, True)
    )
    moved = Block(forward_s=forward_s, backward_s=backward_s)
    return moved + _moved(setting, (_NETWORK, m.top_k * m.moe_ffn))


def _merged(setting: BlockInputs) -> Block:
    """Building W + B A, and reducing the gradient of W to those of A and B."""
    m, s = setting.model, setting.strategies
    if not is_any(s.adapts_experts):
        return Block()
    inner = (1.0 + m.is_gated) * m.moe_ffn
    block = Block()
    for outputs, inputs in ((inner, m.expert_hidden), (m.expert_hidden, m.moe_ffn)):
        rows = m.experts * outputs
        rank = np.maximum(s.adapter_rank, 1.0)
        low_rank = trained_gemm(rows, inputs, rank, dtype=BF16, kind=SKINNY)
        copied = Block(forward_s=setting.memory_bound_s(_MERGED_MOVED * rows * inputs))
        block = block + trained(setting, low_rank, trains=1.0) + copied
    launches = np.where(np.greater(s.adapter_bytes, 2.0), 10.0, 6.0)
    return scale_block(s.adapts_experts, block + Block(launches=launches))


def _hooked(s: Strategies, block: Block) -> Block:
    more = 1.0 + CHECKPOINT_LAUNCHES * s.recompute_full
    return Block(
        forward_s=block.forward_s,
        backward_s=block.backward_s,
        weight_s=block.weight_s,
        recomputed_s=block.recomputed_s,
        launches=block.launches * more,
    )
