"""The names of all-to-all backends, and the parallel degrees of an instance."""

from dataclasses import dataclass, replace
from enum import StrEnum


class A2aBackend(StrEnum):
    """All-to-all backends, by which tokens of attention-data ranks reach their experts."""

    LEAST = "least"
    """Whatever is fastest at each size; for launches that do not say."""
    ALLGATHER = "allgather"
    """Every rank gathers all tokens; results are summed and scattered."""
    NORMAL = "deepep_normal"
    """DeepEP's kernels for many tokens send the copies to their experts."""
    LOW_LATENCY = "deepep_low_latency"
    """DeepEP's kernels for few tokens; those for many where a step has more than their buffers
    hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDegrees:
    """Parallel degrees of one instance."""

    attention_tensor: int = 1
    attention_data: int = 1
    moe_tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    context: int = 1
    """Tensor ranks that share the positions of a cache (decode context parallelism)."""
    side_context: int = 1
    """Context ranks that share the positions of an indexer's keys and of a drafter's cache."""
    stage_machines: int = 1
    """Machines over which the stages of a pipeline are spread, as many on each; 1: the instance is
    on the fewest machines that hold it."""

    def sharing(self, context: int, *, shares_side: bool) -> "InstanceDegrees":
        """Return the degrees with so many context ranks, which share all caches or the main one."""
        return replace(self, context=context, side_context=context if shares_side else 1)

    @property
    def devices(self) -> int:
        """Count the devices of one instance."""
        return self.attention_tensor * self.attention_data * self.pipeline
