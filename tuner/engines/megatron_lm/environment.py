"""The environment variables of megatron-core, as bash; values that the user sets win.

CUDA_DEVICE_MAX_CONNECTIONS orders the launches of communication and computation: one queue where
collectives of tensor or context parallelism overlap with GEMMs, many where sharded state or
overlapped expert all-to-all needs streams of its own (`validate_args` of core_v0.18.0).
"""

from typing import Final, Protocol

from tuner.catalog.programs import DeviceKind
from tuner.config.train import TrainDecision

_ONE_QUEUE: Final = """\
# Megatron-LM's overlap of communication and computation relies on one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
"""
_MANY_QUEUES: Final = """\
# Communication on streams of its own needs more than one hardware queue.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}"
"""
_OFFLOAD: Final = """\
# Without this, Transformer Engine offloads weights as well.
export NVTE_CPU_OFFLOAD_V1="${NVTE_CPU_OFFLOAD_V1:-1}"
"""
_GRAPHS: Final = """\
# Collectives inside CUDA graphs must not register memory that the allocator may remap.
export NCCL_GRAPH_REGISTER="${NCCL_GRAPH_REGISTER:-0}"
"""
_EAGER: Final = """\
# torch would compile small functions for this processor in every run.
export TORCHDYNAMO_DISABLE="${TORCHDYNAMO_DISABLE:-1}"
"""


class Overlaps(Protocol):
    """The fields of a configuration that ask for hardware queues."""

    @property
    def zero_stage(self) -> int: ...
    @property
    def a2a_overlap(self) -> bool: ...


def many_queues_for(settings: Overlaps) -> str:
    """Name what needs more than one hardware queue; empty where nothing does."""
    if settings.zero_stage > 1:
        return "Megatron-FSDP"
    return "the overlap of the expert all-to-all" if settings.a2a_overlap else ""


def environment(decision: TrainDecision, *, device_kind: DeviceKind = "cuda") -> str:
    """Return bash that exports what the decision needs on such devices."""
    return (
        (_EAGER if device_kind == "cpu" else "")
        + (_MANY_QUEUES if many_queues_for(decision) else _ONE_QUEUE)
        + (_OFFLOAD if decision.activation_offload else "")
        + (_GRAPHS if decision.cuda_graph != "none" else "")
    )
