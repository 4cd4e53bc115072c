"""Seconds of adapters beside frozen layers.

An adapter is two GEMMs forward and four backward, of its rank against the width of what the matrix
reads or writes, and element-wise kernels: casts of an fp32 adapter, the scale, the sum with the
layer's output, the sum of both gradients of the input. Bytes a token moves with inputs i and
outputs o, and launches of a forward pass, counted over PEFT 0.21.2 (tuners/lora/layer.py):

    fp32              6 i + 24 o      12 i + 20 o     6
    bf16              10 o            6 i + 4 o       4
    under autocast    12 i + 10 o     18 i + 4 o      8

Under tensor parallelism every width counts a rank's share. Routed experts have an adapter each, in
grouped GEMMs over the copies of their tokens.

Not covered: collectives inside an adapter, which are of its rank's width; dropout.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Numbers
from tuner.costs.train.adapters import AdaptedMatrix, is_tuned
from tuner.costs.train.parts import Block, BlockInputs, scale_block, select_block, trained
from tuner.prices.ops import BF16, FP32, SKINNY, trained_gemm


def adapter_blocks(setting: BlockInputs, matrices: Iterable[AdaptedMatrix]) -> Block:
    """Sum over the matrices that have an adapter."""
    block = Block()
    if is_tuned(setting.strategies):
        for matrix in matrices:
            block = block + adapter_block(setting, matrix)
    return block


def adapter_block(setting: BlockInputs, matrix: AdaptedMatrix) -> Block:
    """Return what one matrix's adapter costs, on every token of the rank."""
    s = setting.strategies
    return _adapter(setting, matrix, rows=s.tokens / s.tensor)


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


def _adapter(setting: BlockInputs, matrix: AdaptedMatrix, *, rows: Numbers) -> Block:
    s = setting.strategies
    is_single, is_cast = np.greater(s.adapter_bytes, 2.0), np.greater(s.autocast, 0.0)

    def chosen(single: float, half: float, cast: float) -> Numbers:
        return np.where(is_cast, cast, np.where(is_single, single, half))

    inputs = matrix.inputs * (1.0 - matrix.shares_input)
    forward = chosen(6.0, 0.0, 12.0) * inputs + chosen(24.0, 10.0, 10.0) * matrix.outputs
    backward = chosen(12.0, 6.0, 18.0) * inputs + chosen(20.0, 4.0, 4.0) * matrix.outputs
    moved = Block(
        forward_s=setting.memory_bound_s(rows * forward),
        backward_s=setting.memory_bound_s(rows * backward),
        launches=(1.0 - matrix.shares_input) * chosen(6.0, 4.0, 8.0),
    )
    gemms = _gemms(setting, matrix, rows=rows, is_fp32=is_single & ~is_cast)
    return scale_block(matrix.ratio * np.greater(s.adapter_rank, 0.0), gemms + moved)


def _gemms(
    setting: BlockInputs, matrix: AdaptedMatrix, *, rows: Numbers, is_fp32: npt.NDArray[np.bool_]
) -> Block:
    """Both GEMMs with their gradients."""
    every = {
        dtype: _gemms_in(setting, matrix, rows=rows, dtype=dtype)
        for dtype, is_used in ((FP32, is_fp32), (BF16, ~is_fp32))
        if np.any(is_used)
    }
    return select_block(is_fp32, *every.values()) if len(every) == 2 else next(iter(every.values()))


def _gemms_in(setting: BlockInputs, matrix: AdaptedMatrix, *, rows: Numbers, dtype: str) -> Block:
    rank = np.maximum(setting.strategies.adapter_rank, 1.0)

    def product(n: Numbers, k: Numbers) -> Block:
        return trained(setting, trained_gemm(rows, n, k, dtype=dtype, kind=SKINNY), trains=1.0)

    into = scale_block(1.0 - matrix.shares_input, product(rank, matrix.inputs))
    return into + product(matrix.outputs, rank)
