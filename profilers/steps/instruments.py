"""Counters of a rank during a step: loads, chunk counts, activation bytes, traffic."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from profilers.steps.memory import ActivationMeter


class Instruments:
    """The notebook of one rank, shared by its layers.

    Args:
        moe_layers: MoE layers of the whole model.
        num_experts: routed experts of a layer.
    """

    def __init__(self, *, moe_layers: int, num_experts: int, device: torch.device) -> None:
        self.meter: ActivationMeter | None = None
        """Meter of activations; set during the metered step only."""
        self.load_LE = torch.zeros(moe_layers, num_experts, dtype=torch.int64, device=device)
        """Token copies that this rank's tokens sent to each expert, in this step."""
        self.chunks_L = torch.zeros(moe_layers, dtype=torch.int64, device=device)
        """Largest chunk count of each MoE layer of this rank, in this step."""
        self.far_bytes = 0
        """Bytes that this rank's dispatch and combine sent to other nodes, in this step."""

    def begin_step(self) -> None:
        """Forget the last step."""
        self.load_LE.zero_()
        self.chunks_L.zero_()
        self.far_bytes = 0

    def note_load(self, moe_layer: int, copies_E: Tensor) -> None:
        """Add one micro-batch's token copies per expert."""
        self.load_LE[moe_layer] += copies_E

    def note_chunks(self, moe_layer: int, chunks: int) -> None:
        """Remember the largest chunk count."""
        self.chunks_L[moe_layer].clamp_(min=chunks)

    def note_far_bytes(self, num_bytes: int) -> None:
        """Add what was sent to other nodes."""
        self.far_bytes += num_bytes

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Meter the graph built inside, in the metered step."""
        with self.meter.recording() if self.meter else nullcontext():
            yield
