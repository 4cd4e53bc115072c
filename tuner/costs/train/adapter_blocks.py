"""Seconds of adapters beside frozen layers.

An adapter is two GEMMs forward and four backward, of its rank against the width of what the matrix
reads or writes, and element-wise kernels: casts of an fp32 adapter, the scale, the sum with the
layer's output, the sum of both gradients of the input. Bytes a token moves with inputs i and
outputs o, and launches of a forward pass, counted over PEFT 0.21.2 (tuners/lora/layer.py):

    fp32              6 i + 24 o      12 i + 20 o     6
    bf16              10 o            6 i + 4 o       4
    under autocast    12 i + 10 o     18 i + 4 o      8

GEMMs of fp32 adapters run on vector units, since PyTorch does not allow TF32 for them. Under tensor
parallelism every width counts a rank's share. Routed experts have an adapter each, in grouped
GEMMs over the copies of their tokens.

Not covered: collectives inside an adapter, which are of its rank's width; dropout.
"""

from collections.abc import Iterable

import numpy as np

from tuner.config.columns import Numbers
from tuner.costs.train.adapters import AdaptedMatrix, is_tuned
from tuner.costs.train.parts import Block, BlockInputs

VECTOR_RATIO = 15.0
"""Of the bf16 peak over fp32 on vector units: 312 / 19.5 TFLOP/s on A100, 989 / 67 on H100."""
SKINNY_TILE = 32.0
"""Columns of the narrowest tile of a GEMM: a rank below is padded to it."""


def adapter_blocks(setting: BlockInputs, matrices: Iterable[AdaptedMatrix]) -> Block:
    """Sum over the matrices that have an adapter."""
    block = Block()
    if is_tuned(setting.strategies):
        for one in matrices:
            block = block + adapter_block(setting, one)
    return block


def adapter_block(setting: BlockInputs, one: AdaptedMatrix) -> Block:
    """Return what one matrix's adapter costs, on every token of the rank."""
    s = setting.strategies
    return _adapter(setting, one, rows=s.tokens / s.tensor)


def expert_adapters(setting: BlockInputs, *, copies: Numbers) -> Block:
    """Return what the adapters of routed experts cost."""
    m, s = setting.model, setting.strategies
    if not is_tuned(s):
        return Block()
    inner = (1.0 + m.is_gated) * m.moe_ffn
    up = AdaptedMatrix(ratio=s.adapts_experts, inputs=m.expert_hidden, outputs=inner)
    down = AdaptedMatrix(ratio=s.adapts_experts, inputs=m.moe_ffn, outputs=m.expert_hidden)
    rows = copies / s.expert_tensor
    return _adapter(setting, up, rows=rows) + _adapter(setting, down, rows=rows)


def _adapter(setting: BlockInputs, one: AdaptedMatrix, *, rows: Numbers) -> Block:
    s = setting.strategies
    is_single, is_cast = np.greater(s.adapter_bytes, 2.0), np.greater(s.autocast, 0.0)
    is_vector = np.where(is_single & ~is_cast, 1.0, 0.0)

    def chosen(single: float, half: float, cast: float) -> Numbers:
        return np.where(is_cast, cast, np.where(is_single, single, half))

    inputs = one.inputs * (1.0 - one.shares_input)
    product_s = _skinny_s(setting, rows, inputs + one.outputs, is_vector=is_vector)
    forward = chosen(6.0, 0.0, 12.0) * inputs + chosen(24.0, 10.0, 10.0) * one.outputs
    backward = chosen(12.0, 6.0, 18.0) * inputs + chosen(20.0, 4.0, 4.0) * one.outputs
    forward_s = product_s + setting.memory_bound_s(rows * forward)
    backward_s = 2.0 * product_s + setting.memory_bound_s(rows * backward)
    ratio = one.ratio * np.greater(s.adapter_rank, 0.0)
    return Block(
        forward_s=ratio * forward_s,
        backward_s=ratio * backward_s,
        weight_s=ratio * product_s,
        launches=ratio * (1.0 - one.shares_input) * chosen(6.0, 4.0, 8.0),
    )


def _skinny_s(
    setting: BlockInputs, rows: Numbers, widths: Numbers, *, is_vector: Numbers
) -> Numbers:
    """Seconds of GEMMs of the adapter's rank against so many columns of every row."""
    s, machine, own = setting.strategies, setting.hardware, setting.constants
    peak = machine.attention_flop_per_s * own.matmul_ratio
    rate = np.where(np.greater(is_vector, 0.0), peak / VECTOR_RATIO, peak)
    flop = 2.0 * rows * widths * np.maximum(s.adapter_rank, SKINNY_TILE)
    bytes_of = 2.0 + 2.0 * is_vector
    return np.maximum(flop / rate, setting.memory_bound_s(bytes_of * rows * widths))
