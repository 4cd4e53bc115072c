"""The few numbers of a training software that decide its memory and that no shape gives.

The defaults are those of Megatron-Core with the transformer engine. A calibration may replace them
inside `MEMORY_BOUNDS` by values fitted to runs of one software, never to one run.

Not covered: what differs between two runs of the same software.
"""

from dataclasses import dataclass
from typing import Final

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
