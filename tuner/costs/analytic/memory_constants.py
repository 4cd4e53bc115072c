"""The few numbers of a training software that decide its memory and that no shape gives.

The defaults are those of Megatron-Core with the transformer engine. A calibration may replace them
inside `MEMORY_BOUNDS` by values fitted to runs of one software, never to one run.

Not covered: what differs between two runs of the same software.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from tuner.costs.analytic.constants import Software
from tuner.costs.analytic.shapes import Numbers

GIB: Final = float(2**30)

WORKSPACE_BYTES: Final = 32.0 * 2**20
"""One cuBLAS workspace on Hopper and later, of PyTorch and of the transformer engine each
(transformer_engine/pytorch/module/base.py)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryConstants:
    """Residuals of one training software, or one set per column."""

    optimizer_bytes: Numbers = 12.0
    """Per parameter: fp32 master and two fp32 moments of Adam."""
    logit_bytes: Numbers = 2.0
    """Per logit at the head's backward; 2 where the fused loss writes gradients over bf16 logits,
    and 4 more for each fp32 copy of them."""
    split_logit_bytes: Numbers = 0.0
    """More per logit where the vocabulary is split over tensor ranks."""
    activation_ratio: Numbers = 1.0
    """Saved activations over those that activations.py counts."""
    weight_gradient_ratio: Numbers = 1.0
    """Temporary weight gradients over one per shape of weight."""
    exchanged_ratio: Numbers = 1.0
    """Of attention's output under context parallelism, kept as it lay before the exchange."""
    live_bytes: Numbers = 2.0 * WORKSPACE_BYTES
    """In the allocator whatever the model."""
    unused_ratio: Numbers = 0.03
    """Of activations and buffers: blocks that the allocator holds and cannot use."""
    context_bytes: Numbers = 2.0 * GIB
    """Outside the allocator: the device's context, loaded kernels, collectives' buffers."""
    graph_ratio: Numbers = 0.1
    """Of the activations: private pools of partial graphs."""


OF_SOFTWARE: Final[Mapping[Software, MemoryConstants]] = {
    # The loss casts logits to fp32 and turns those into gradients in place
    # (megatron/core/tensor_parallel/cross_entropy.py); no transformer engine keeps gradients.
    Software.MEGATRON_2021: MemoryConstants(logit_bytes=6.0),
    Software.MEGATRON_2025: MemoryConstants(),
    Software.MEGATRON_2026: MemoryConstants(),
    # torch.nn.functional.cross_entropy of logits cast to fp32: its output, the gradient of that and
    # of its input; a split vocabulary adds a product (torch/distributed/tensor/parallel/loss.py).
    Software.TORCH_FSDP: MemoryConstants(
        logit_bytes=12.0, split_logit_bytes=4.0, exchanged_ratio=0.0, unused_ratio=0.02
    ),
}
"""What is known of a software without any run of it."""

FUSED_LOSS_BYTES: Final = 4.0
"""Per logit in PyTorch where one kernel computes the loss and its gradient: bf16 logits, bf16
gradients. Of FlashAttention's kernel (llm-foundry's default) and of compiled losses."""


def memory_constants(
    software: Sequence[Software], *, has_fused_loss: Sequence[bool] = ()
) -> MemoryConstants:
    """One set per column; `has_fused_loss` matters to PyTorch's software alone."""
    fused = has_fused_loss or [False] * len(software)
    sets = [OF_SOFTWARE[one] for one in software]
    columns = {
        field.name: np.array([float(getattr(one, field.name)) for one in sets])
        for field in fields(MemoryConstants)
    }
    is_fused = np.array(
        [one is Software.TORCH_FSDP and flag for one, flag in zip(software, fused, strict=True)]
    )
    columns["logit_bytes"] = np.where(is_fused, FUSED_LOSS_BYTES, columns["logit_bytes"])
    columns["split_logit_bytes"] = np.where(is_fused, 0.0, columns["split_logit_bytes"])
    return MemoryConstants(**columns)
