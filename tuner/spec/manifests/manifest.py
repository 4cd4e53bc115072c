"""A manifest: what one release of a launch target can express, and which combinations it refuses.

Every field can only take something away from the defaults, which allow everything, so that several
manifests join into one (`joined`): sets that allow intersect, sets that forbid unite, limits take
the smaller, offers must be made by all, needs hold when one has them.

Not covered: rules that hold for every target (degrees that must divide heads, experts, layers or
the batch), which belong to the enumeration of candidates; what a device cannot do (MXFP8 below
Blackwell), which belongs to its datasheet.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Final

from profilers.steps.config import Recompute
from tuner.spec.features import ModelFeature

LARGEST_CHUNKS: Final = 64
"""Chunk counts above this leave an expert too few rows to multiply; no target needs more."""

MOST_MTP_LAYERS: Final = 2**24
"""No limit of its own."""

DEFAULT_RANK_ORDER: Final = "tp-cp-ep-dp-pp"
"""Neighbouring ranks share a tensor-parallel group, distant ones a pipeline."""

PIPELINE_INSIDE_ORDER: Final = "tp-cp-ep-pp-dp"
"""Replicas are the most distant (Megatron's `--use-tp-pp-dp-mapping`)."""

SCHEDULES: Final = frozenset({"1f1b", "interleaved", "zero_bubble"})
DISPATCHERS: Final = frozenset({"alltoall", "allgather", "deepep", "hybridep", "hierarchical"})
GRAPHS: Final = frozenset({"none", "partial", "full_iteration"})
MODULES: Final = frozenset(
    {"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"}
)
"""What selective recomputation can cover, in Megatron's words; without any it means `moe`."""

PRECISIONS: Final = frozenset(
    {"bf16", "fp32", "fp8-delayed", "fp8-tensorwise", "fp8-blockwise", "mxfp8", "nvfp4"}
)

_FORBID: Final = frozenset(
    {
        "unsupported",
        "chunks_need_modules",
        "delayed_scaling_excludes",
        "a2a_overlap_excludes",
        "partial_graph_excludes",
    }
)
"""Sets that grow when manifests join; every other set shrinks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one target, or every one of several, can express."""

    names: tuple[str, ...]
    """The targets that this speaks for."""
    release: str = ""
    """Of the program; empty where it ships with the product."""
    source: str = ""
    """Where the facts were read; empty where it ships with the product."""

    zero_stages: frozenset[int] = frozenset({0, 1, 2, 3})
    zero_stages_with_pipeline: frozenset[int] = frozenset({0, 1, 2, 3})
    """Those left when there is more than one pipeline rank."""
    shard_ranks_zero_stages: frozenset[int] = frozenset({1, 2, 3})
    """Stages whose sharded state can have several copies (HSDP)."""
    gradient_bytes: frozenset[int] = frozenset({2, 4})
    """Of one main gradient."""
    unsharded_gradient_bytes: frozenset[int] = frozenset({2, 4})
    """The same at zero_stage 0, of parameters in 16 bits or less."""
    optimizer_offload_zero_stages: frozenset[int] = frozenset({0, 1, 2, 3})
    """Stages whose optimizer state can live in host memory; empty: it never can."""
    overlap_grad_reduce: bool = True
    """Gradient sums can run beside the backward pass."""
    ddp_bucket_size: bool = True
    """The size of the buckets that are reduced there can be stated."""
    overlap_param_gather: bool = True
    """Parameter gathers can run beside the forward pass."""
    param_gather_needs_grad_reduce: bool = False
    """Overlapped gathers need overlapped sums and sharded optimizer state."""

    recompute: frozenset[Recompute] = frozenset(Recompute)
    recompute_modules: frozenset[str] = MODULES
    """What selective recomputation can cover."""
    recompute_num_layers: bool = True
    """Full recomputation can be limited to the first layers of every stage."""
    recompute_per_stage: bool = True
    activation_offload: bool = True
    """Saved activations can live in host memory."""
    activation_offload_recompute: frozenset[Recompute] = frozenset(Recompute)
    """Levels under which they can."""
    activation_offload_graphs: frozenset[str] = GRAPHS
    """CUDA graphs under which they can."""
    largest_chunks: int = LARGEST_CHUNKS
    """Any integer from 1 to this can be a chunk count."""
    chunks_per_stage: bool = True
    chunks_need: frozenset[Recompute] = frozenset({Recompute.SELECTIVE, Recompute.FULL})
    """Recompute levels under which more than one chunk saves memory."""
    chunks_need_modules: frozenset[str] = frozenset()
    """Modules that selective recomputation must cover for more than one chunk."""

    schedules: frozenset[str] = SCHEDULES
    virtual_pipeline: bool = True
    zero_bubble_needs_virtual_pipeline: bool = False
    context_parallel: bool = True
    uneven_layout: bool = True
    """Stages may differ in their number of layers."""
    empty_stages: bool = True
    """A stage may hold no transformer layer."""
    tensor_with_pipeline: bool = True
    """Tensor and pipeline parallelism in one run."""
    tensor_beyond_kv_heads: bool = True
    """Tensor parallelism may exceed the key-value heads, which are then replicated."""
    sequence_parallel: bool = True
    """Tensor ranks can share the sequence between the products."""
    sequence_parallel_optional: bool = True
    """Tensor parallelism without sequence parallelism is possible for dense layers."""
    moe_needs_sequence_parallel: bool = False
    """Tensor parallelism with MoE layers needs sequence parallelism."""
    rank_orders: frozenset[str] = frozenset({DEFAULT_RANK_ORDER, PIPELINE_INSIDE_ORDER})

    expert_tensor_parallel: bool = True
    """Above 1; 1 is always possible."""
    expert_folding: bool = True
    """Expert parallelism may exceed data parallelism."""
    expert_folding_needs_sharding: bool = False
    """At zero_stage 0 experts are spread over context and tensor ranks only."""
    moe_tensor_needs_experts: bool = False
    """Tensor parallelism of a MoE model needs expert parallelism."""
    moe_offload_needs_one_tensor_rank: bool = False
    """The optimizer state of a MoE model under tensor parallelism stays on the devices."""
    dispatchers: frozenset[str] = DISPATCHERS
    dispatchers_with_pipeline: frozenset[str] = DISPATCHERS
    a2a_overlap: bool = True
    """Dispatch and combine can run beside another micro-batch's work."""
    a2a_overlap_dispatchers: frozenset[str] = DISPATCHERS
    a2a_overlap_needs_virtual_pipeline: bool = False
    """When there is more than one pipeline rank."""
    a2a_overlap_recompute: frozenset[Recompute] = frozenset(Recompute)
    a2a_overlap_excludes: frozenset[str] = frozenset()
    """Modules that it cannot recompute."""
    a2a_overlap_graphs: frozenset[str] = GRAPHS
    a2a_overlap_largest_mtp: int = MOST_MTP_LAYERS
    a2a_overlap_mtp_needs_pipeline: bool = False

    cuda_graphs: frozenset[str] = GRAPHS
    cuda_graphs_with_pipeline: frozenset[str] = GRAPHS
    full_graph_dispatchers: frozenset[str] = DISPATCHERS
    """Those whose MoE layers have the fixed sizes that a graph of a whole step needs."""
    partial_graph_recompute: frozenset[Recompute] = frozenset(Recompute)
    partial_graph_excludes: frozenset[str] = frozenset()
    """Modules that it cannot recompute."""

    precisions: frozenset[str] = PRECISIONS
    delayed_scaling_excludes: frozenset[str] = frozenset()
    """Modules that fp8-delayed cannot recompute."""
    mtp: bool = True
    """Multi-token-prediction layers."""
    tied_embeddings_with_pipeline: bool = True
    one_bias_switch_is_needed: bool = False
    """Biases are everywhere or nowhere, those of queries, keys and values apart, and experts with
    biases stay whole."""
    unsupported: frozenset[ModelFeature] = frozenset()
    parts: tuple["Capabilities", ...] = ()
    """The single targets that an intersection was made of, so that a refusal can name one."""


def with_gradients(target: Capabilities, *, gradient_bytes: int, precision: str) -> Capabilities:
    """Return what a target can express with main gradients of so many bytes."""
    if precision == "fp32" or gradient_bytes in target.unsharded_gradient_bytes:
        return target
    return replace(
        target,
        zero_stages=target.zero_stages - {0},
        parts=tuple(
            with_gradients(part, gradient_bytes=gradient_bytes, precision=precision)
            for part in target.parts
        ),
    )


def joined(one: Capabilities, other: Capabilities) -> Capabilities:
    """Return what both can express."""
    values = {
        field.name: _join(field.name, getattr(one, field.name), getattr(other, field.name))
        for field in fields(Capabilities)
        if field.name not in ("names", "release", "source", "parts")
    }
    return Capabilities(
        names=one.names + other.names,
        parts=(*(one.parts or (one,)), *(other.parts or (other,))),
        **values,
    )


def _join(name: str, one: Any, other: Any) -> Any:
    if isinstance(one, bool):
        return one or other if "need" in name else one and other
    if isinstance(one, int):
        return min(one, other)
    return one | other if name in _FORBID else one & other
