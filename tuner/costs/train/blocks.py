"""Seconds of a transformer's other blocks: dense network, embedding, head, what MTP adds.

Letters: see tuner/costs/train/parts.py. The head's GEMM stays in bf16 under every recipe.

Not covered: chunked or fused losses.
"""

from dataclasses import replace

import numpy as np

from tuner.costs.train.adapter_blocks import adapter_blocks
from tuner.costs.train.adapters import network_matrices
from tuner.costs.train.parts import (
    BACKWARD_BYTES,
    Block,
    BlockInputs,
    feed_forward,
    gemm,
    norm_and_residual,
    tensor_pass_s,
)
from tuner.prices.ops import BF16


def dense_block(setting: BlockInputs) -> Block:
    """Norm, feed-forward network, residual addition."""
    m, s = setting.model, setting.strategies
    inner = feed_forward(setting, rows=s.tokens, width=m.dense_ffn / s.tensor)
    inner = inner + adapter_blocks(setting, network_matrices(m, s, m.dense_ffn))
    block = replace(inner, recomputed_s=s.recompute_mlp * inner.forward_s)
    return block + norm_and_residual(setting, overlapped=True)


def embedding_block(setting: BlockInputs) -> Block:
    """Look rows up, add positions, reduce over the vocabulary's shards."""
    s = setting.strategies
    kernels_s = setting.memory_bound_s(setting.hidden_bytes(3.0))
    reduce_s = 0.5 * tensor_pass_s(setting)
    return Block(
        forward_s=kernels_s,
        backward_s=BACKWARD_BYTES * kernels_s,
        tensor_s=reduce_s,
        tensor_backward_s=np.where(np.greater(s.sequence_parallel, 0.0), 0.5 * reduce_s, 0.0),
        launches=5.0,
    )


def head_block(setting: BlockInputs) -> Block:
    """Final norm, logits over the vocabulary's shard, cross entropy."""
    m, s = setting.model, setting.strategies
    logits = gemm(setting, s.tokens, m.vocab / s.tensor, m.hidden, dtype=BF16)
    loss_bytes = setting.constants.loss_bytes * s.tokens * m.vocab / s.tensor
    loss_s = setting.memory_bound_s(loss_bytes)
    # Several streams are read and joined.
    norm_s = setting.memory_bound_s(setting.hidden_bytes(2.0 + m.has_streams * m.streams))
    gather_s = 0.5 * tensor_pass_s(setting)
    return logits + Block(
        forward_s=loss_s + norm_s + setting.constants.batch_s,
        backward_s=loss_s + BACKWARD_BYTES * norm_s,
        tensor_s=np.where(np.greater(s.sequence_parallel, 0.0), gather_s, 0.0),
        tensor_backward_s=gather_s,
        launches=15.0,
    )


def mtp_projection_block(setting: BlockInputs) -> Block:
    """The input of a multi-token-prediction layer: two norms and the 2 h x h projection."""
    m, s = setting.model, setting.strategies
    joined = gemm(setting, s.tokens, m.hidden / s.tensor, 2.0 * m.hidden)
    norms_s = setting.memory_bound_s(setting.hidden_bytes(6.0))
    pass_s = 0.5 * tensor_pass_s(setting)
    return joined + Block(
        forward_s=norms_s,
        backward_s=BACKWARD_BYTES * norms_s,
        tensor_s=pass_s,
        tensor_backward_s=pass_s,
        launches=10.0,
    )
