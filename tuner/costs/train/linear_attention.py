"""Seconds of linear attention: projections, short convolution, scan in chunks, gated norm.

    H  heads    K  key heads    N  key width    P  value width    e  bytes of an element

Tensor parallelism splits heads and what is projected for them. The convolution over a few tokens
reads and writes 2 (2 K N + H P) e bytes per token, the gated norm 3 H P e. The scan is priced by
its FLOPs and bytes (tuner/costs/prices/linear_scan.py).

Not covered: the all-to-alls that exchange sequence for heads under context parallelism; documents
inside a sequence.
"""

from dataclasses import replace

import numpy as np

from tuner.config.columns import Numbers
from tuner.costs.ops import linear_scan
from tuner.costs.train.parts import (
    BACKWARD_BYTES,
    Block,
    BlockInputs,
    gemm,
    norm_and_residual,
    select_block,
)
from tuner.spec.linear_attention import LINEAR_NAMES

SCAN_LAUNCHES = 6.0
"""Convolution with the norm's kernel, and those of a scan: decays, scores, states of chunks,
passing them on, outputs."""


def linear_block(setting: BlockInputs) -> Block:
    """Norm, projections, convolution, scan, gated norm, output projection, residual addition."""
    m, s = setting.model, setting.strategies
    rows = s.tokens
    inputs = gemm(
        setting, rows, np.maximum(m.linear_inputs / s.tensor, 1.0), m.hidden, follows_norm=True
    )
    values = np.maximum(m.linear_values / s.tensor, 1.0)
    outputs = gemm(setting, rows, m.hidden, values, is_scattered=True)
    second = gemm(
        setting,
        rows,
        np.maximum(m.linear_rank_outputs / s.tensor, 1.0),
        np.maximum(m.linear_rank, 1.0),
    )
    second = select_block(np.greater(m.linear_rank, 0.0), second, Block())
    moved = (2.0 * m.linear_conv + 3.0 * m.linear_values) / s.tensor * s.element_bytes * rows
    moved_s = setting.memory_bound_s(moved)
    scan = linear_scan(
        kind=_kind(m.linear_kind),
        batch=s.micro_batch,
        sequence=s.sequence / s.context,
        heads=np.maximum(m.linear_heads / s.tensor, 1.0),
        key_heads=np.maximum(m.linear_key_heads / s.tensor, 1.0),
        key_dim=m.linear_key_dim,
        value_dim=m.linear_value_dim,
        chunk=np.maximum(m.linear_chunk, 1.0),
        is_delta=m.linear_is_delta,
        decays_channels=m.linear_decays_channels,
    )
    scan_s = setting.prices.seconds(scan)
    scan_back_s = setting.prices.seconds(replace(scan, direction="backward"))
    own = Block(
        forward_s=moved_s + scan_s,
        backward_s=BACKWARD_BYTES * moved_s + scan_back_s,
        launches=setting.constants.dense_launches * 0.5 + SCAN_LAUNCHES,
    )
    return inputs + outputs + second + own + norm_and_residual(setting, overlapped=True)


def _kind(codes: Numbers) -> str:
    """Name the kind of linear attention; empty where columns have several."""
    distinct = np.unique(np.asarray(codes))
    return LINEAR_NAMES[int(distinct[0])].value if len(distinct) == 1 else ""
