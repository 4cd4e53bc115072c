"""Limits on the search: the allowed values of each named decision.

A decision that is absent is not limited. A single value may be written without brackets.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from profilers.records import Record
from profilers.steps.config import Recompute
from tuner.spec.fields import Count, one_or_many


def _whole_stage(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is not a stage")  # noqa: TRY004 - pydantic reports no other kind
    return value


Counts = Annotated[tuple[Count, ...], Field(min_length=1), BeforeValidator(one_or_many)]
Stages = Annotated[
    tuple[Annotated[Literal[0, 1, 2, 3], BeforeValidator(_whole_stage)], ...],
    Field(min_length=1),
    BeforeValidator(one_or_many),
]
Recomputes = Annotated[tuple[Recompute, ...], Field(min_length=1), BeforeValidator(one_or_many)]


Switches = Annotated[tuple[bool, ...], Field(min_length=1), BeforeValidator(one_or_many)]
Dispatchers = Annotated[
    tuple[Literal["alltoall", "allgather", "deepep", "hybridep", "hierarchical"], ...],
    Field(min_length=1),
    BeforeValidator(one_or_many),
]
Graphs = Annotated[
    tuple[Literal["none", "partial", "full_iteration"], ...],
    Field(min_length=1),
    BeforeValidator(one_or_many),
]
Schedules = Annotated[
    tuple[Literal["1f1b", "interleaved", "zero_bubble"], ...],
    Field(min_length=1),
    BeforeValidator(one_or_many),
]


GradientBytes = Annotated[
    tuple[Annotated[Literal[2, 4], BeforeValidator(_whole_stage)], ...],
    Field(min_length=1),
    BeforeValidator(one_or_many),
]


class Search(Record):
    """Allowed values by decision, in Megatron's names; None leaves the decision free."""

    tensor_model_parallel_size: Counts | None = None
    """Ranks that share each dense matrix."""
    pipeline_model_parallel_size: Counts | None = None
    """Stages that the layers are cut into."""
    virtual_pipeline_model_parallel_size: Counts | None = None
    """Model chunks per pipeline rank; 1 is the plain schedule."""
    context_parallel_size: Counts | None = None
    """Ranks that share each sequence."""
    data_parallel_size: Counts | None = None
    """Replicas of the dense layers."""
    expert_model_parallel_size: Counts | None = None
    """Expert-parallel ranks."""
    expert_tensor_parallel_size: Counts | None = None
    """Ranks that share each expert's matrices."""
    micro_batch_size: Counts | None = None
    """Sequences of one forward pass on one replica."""
    zero_stage: Stages | None = None
    """ZeRO stage: 1 shards the optimizer state over the data-parallel ranks, 2 gradients too, 3
    parameters too."""
    recompute: Recomputes | None = None
    """Recomputation in the backward pass."""
    chunks: Counts | None = None
    """MemFine chunks of an expert layer's tokens."""
    dispatcher: Dispatchers | None = None
    """Token dispatcher between expert-parallel ranks."""
    a2a_overlap: Switches | None = None
    """Overlap of dispatch and combine with another micro-batch's computation."""
    cuda_graph: Graphs | None = None
    """Scope of CUDA graphs in a step."""
    schedule: Schedules | None = None
    """Pipeline schedule."""
    optimizer_offload: Switches | None = None
    """Offload of the optimizer state to host memory."""
    activation_offload: Switches | None = None
    """Offload of saved activations to host memory."""
    gradient_bytes: GradientBytes | None = None
    """Bytes of the main gradient of a parameter; 4 by default, 2 reduces gradients in bf16."""
