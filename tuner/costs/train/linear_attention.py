"""Seconds of linear attention: projections, short convolution, scan in chunks, gated norm.

    H  heads    K  key heads    N  key width    P  value width    e  bytes of an element

Tensor parallelism splits heads and what is projected for them. The convolution over a few tokens
reads and writes 2 (2 K N + H P) e bytes per token, the gated norm 3 H P e. The scan is priced by
its FLOPs and bytes (tuner/prices/linear_scan.py).

Under context parallelism all-to-alls give each rank the whole sequence for a part of its heads:
what the convolution and the scan read is sent, and the scan's output back. Nothing runs beside
them (Megatron-Core, core_v0.19.0, megatron/core/ssm/mamba_context_parallel.py, gated_delta_net).

Not covered: documents inside a sequence.
"""

from dataclasses import replace

import numpy as np

from tuner.config.columns import Numbers
from tuner.costs.train.adapter_blocks import adapter_blocks
from tuner.costs.train.adapters import linear_matrices
from tuner.costs.train.parts import (
    BACKWARD_BYTES,
    Block,
    BlockInputs,
    gemm,
    norm_and_residual,
    select_block,
)
from tuner.prices.ops import linear_scan
from tuner.prices.train.collectives import all_to_all_latency_s, all_to_all_s
from tuner.spec.linear_attention import LINEAR_NAMES

SCAN_LAUNCHES = 6.0
"""Convolution with the norm's kernel, and those of a scan: decays, scores, states of chunks,
passing them on, outputs."""

MAMBA_INPUTS = 5.0
"""All-to-alls of what Mamba-2 projects: gate, values, B, C and time steps each by itself."""


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
    sent_s = _all_to_alls_s(setting)
    scan = scan_block(setting) + Block(
        forward_s=moved_s,
        backward_s=BACKWARD_BYTES * moved_s,
        context_s=sent_s,
        context_backward_s=sent_s,
        launches=setting.constants.dense_launches * 0.5 + SCAN_LAUNCHES,
    )
    adapters = adapter_blocks(setting, linear_matrices(m, s))
    block = inputs + outputs + second + scan + adapters
    return block + norm_and_residual(setting, overlapped=True)


def scan_block(setting: BlockInputs) -> Block:
    """Return the scan alone, without its launches."""
    m, s = setting.model, setting.strategies
    scan = linear_scan(
        kind=_kind(m.linear_kind),
        batch=s.micro_batch,
        sequence=s.sequence,
        heads=np.maximum(m.linear_heads / (s.tensor * s.context), 1.0),
        key_heads=np.maximum(m.linear_key_heads / (s.tensor * s.context), 1.0),
        key_dim=m.linear_key_dim,
        value_dim=m.linear_value_dim,
        chunk=np.maximum(m.linear_chunk, 1.0),
        is_delta=m.linear_is_delta,
        decays_channels=m.linear_decays_channels,
    )
    return Block(
        forward_s=setting.prices.seconds(scan),
        backward_s=setting.prices.seconds(replace(scan, direction="backward")),
    )


def _all_to_alls_s(setting: BlockInputs) -> Numbers:
    """All-to-alls of one pass between ranks that share a sequence; none without such."""
    m, s, constants = setting.model, setting.strategies, setting.constants
    group, machine = setting.groups.context, setting.hardware
    # Each rank needs the key heads of its heads, and one at least.
    keys = m.linear_key_heads / s.tensor
    repeated = 2.0 * m.linear_key_dim * np.maximum(s.context - keys, 0.0)
    element = s.element_bytes * s.tokens
    # What has a low rank is sent at its full width.
    low_ranks = m.linear_rank * m.linear_rank_outputs / np.maximum(m.linear_values, 1.0)
    read = m.linear_inputs - low_ranks + m.linear_rank_outputs
    inputs = element * (read / s.tensor + repeated)
    outputs = element * m.linear_values / s.tensor
    inside, outside = (group.inside - 1.0) / group.ranks, 1.0 - group.inside / group.ranks
    parts_s = sum(
        all_to_all_s(inside * sent, outside * sent, group, machine, constants)
        for sent in (inputs, outputs)
    )
    more = np.where(np.greater(m.linear_is_delta, 0.0), 0.0, MAMBA_INPUTS - 1.0)
    return np.where(group.ranks > 1.0, parts_s + more * all_to_all_latency_s(group, constants), 0.0)


def _kind(codes: Numbers) -> str:
    """Name the kind of linear attention; empty where columns have several."""
    distinct = np.unique(np.asarray(codes))
    return LINEAR_NAMES[int(distinct[0])].value if len(distinct) == 1 else ""
