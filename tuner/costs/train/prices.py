"""Results of the analytic model: seconds and bytes per column, with their breakdown."""

from dataclasses import dataclass
from typing import Final

from tuner.config.columns import Numbers
from tuner.config.shapes import Grid, number

CAUSES_IN_PASSES: Final = (
    *("tensor_s", "context_s", "expert_s", "recompute_s", "host_s"),
    *("sharding_s", "offload_s"),
)
"""Fields of a layer and of a step: disjoint parts of the passes, beside computation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPrice:
    """Seconds of one optimizer step, per column."""

    step_s: Numbers
    """Seconds of a step by the closed form of the pipeline."""
    forward_s_SC: Grid
    """Seconds of one micro-batch's forward pass on each stage, exposed communication included;
    empty where a search skipped it."""
    backward_s_SC: Grid
    """Seconds of one micro-batch's backward pass on each stage, exposed communication and
    recomputation included; empty likewise."""
    boundary_s: Numbers
    """Seconds of sending one micro-batch from a stage to the next."""
    once_s: Numbers
    """Seconds once a step on the slowest rank: exposed gradient reduction and all-gather,
    optimizer."""
    bubble_s: Numbers
    """Part of `step_s`: waiting for other stages."""
    tensor_s: Numbers
    """Part of `step_s`: exposed collectives of tensor parallelism."""
    context_s: Numbers
    """Part of `step_s`: exposed collectives of context parallelism."""
    expert_s: Numbers
    """Part of `step_s`: exposed dispatch and combine, recomputed ones included."""
    recompute_s: Numbers
    """Part of `step_s`: recomputed kernels; their collectives count above, their launches below."""
    host_s: Numbers
    """Part of `step_s`: waiting for the host's kernel launches."""
    sharding_s: Numbers
    """Part of `step_s`: exposed gathers and reductions of shards inside the passes."""
    offload_s: Numbers
    """Part of `step_s`: exposed copies of activations to and from host memory."""

    def by_cause(self, *, simulated_s: float) -> dict[str, float]:
        """Split the step of a single column into seconds by cause (tuner/plans/breakdown.py).

        Args:
            simulated_s: the step with every pass simulated, not below `step_s`; what it adds is
                pipeline bubble.
        """
        # Rounding may leave a bubble of less than nothing.
        bubble_s = max(0.0, number(self.bubble_s)) + simulated_s - number(self.step_s)
        parts = {"bubble": bubble_s}
        parts |= {name[:-2]: number(getattr(self, name)) for name in CAUSES_IN_PASSES}
        parts["once"] = number(self.once_s)
        return {"computation": simulated_s - sum(parts.values())} | parts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryPrice:
    """Bytes on the most-loaded device of every pipeline rank, [P, C]."""

    weights_PC: Grid
    gradients_PC: Grid
    optimizer_PC: Grid
    activations_PC: Grid
    """Saved for backward at the peak, logits and loss included."""
    buffers_PC: Grid
    """Dispatch buffers at the routed load, communication buffers, temporaries of one layer."""
    reserve_PC: Grid
    """Private pools of CUDA graphs, fragmentation of the allocator."""
    context_PC: Grid
    """Outside of the allocator: the device's context, kernels, collectives' buffers."""

    @property
    def allocated_PC(self) -> Grid:
        """Return the bytes that tensors take: torch.cuda.max_memory_allocated."""
        return (
            self.weights_PC
            + self.gradients_PC
            + self.optimizer_PC
            + self.activations_PC
            + self.buffers_PC
        )

    @property
    def reserved_PC(self) -> Grid:
        """Return the bytes that the allocator holds: torch.cuda.max_memory_reserved."""
        return self.allocated_PC + self.reserve_PC

    @property
    def total_PC(self) -> Grid:
        """Return all bytes, to be compared with the device's memory."""
        return self.reserved_PC + self.context_PC
