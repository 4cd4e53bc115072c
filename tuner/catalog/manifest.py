"""A manifest: what one release of a launch target can express, and which combinations it refuses.

Fields only restrict the defaults, which allow everything but the features of `CONDITIONAL`: these a
target lacks unless it states their conditions. Manifests can be intersected: allowed sets
intersect, forbidden sets unite, the smaller limit applies, a feature needs the support of all, a
requirement that of one. What a target can express of some models only (context parallelism, but not
with sparse attention) is a `Restriction`, which `of_model` applies by the same rules.

Not covered: rules that hold for every target (degrees that must divide heads, experts, layers or
the batch), which belong to the enumeration of candidates; what a device cannot do (MXFP8 below
Blackwell), which belongs to its datasheet.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from profilers.steps.config import Recompute
from tuner.spec.features import ModelFeature
from tuner.spec.goal import Precision
from tuner.spec.tune import ADAPTER_TARGETS, EXPERTS, Adapters, members

LARGEST_CHUNKS: Final = 64
"""Largest count of MemFine chunks: more leave too few rows for an expert's GEMMs; no target needs
more."""

MOST_MTP_LAYERS: Final = 2**24
"""No limit."""

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
"""Modules of selective recomputation, by Megatron's names; without any it means `moe`."""

ADAPTERS: Final = frozenset({"lora", "qlora"})

PRECISIONS: Final = frozenset(precision.value for precision in Precision)

_FORBID: Final = frozenset(
    {
        "unsupported",
        "unsupported_reasons",
        "restrictions",
        "chunks_need_modules",
        "delayed_scaling_excludes",
        "excludes",
        "partial_graph_excludes",
        "fused_layers",
        "adapter_limits",
        "reshard_converters",
        "rank_splitting_targets",
        "networks_become_experts",
    }
)
"""Sets that grow in an intersection of manifests; every other set shrinks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Settings beside which a target has a feature."""

    needs_experts: bool = False
    """The feature needs expert parallelism above 1."""
    needs_virtual_pipeline: bool = False
    """The feature needs a virtual pipeline where there is more than one pipeline rank."""
    dispatchers: frozenset[str] = DISPATCHERS
    recompute: frozenset[Recompute] = frozenset(Recompute)
    excludes: frozenset[str] = frozenset()
    """Modules that the feature does not let a launch recompute."""
    cuda_graphs: frozenset[str] = GRAPHS
    largest_mtp: int = MOST_MTP_LAYERS
    mtp_needs_pipeline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Restriction:
    """Limits of a target for models with a feature."""

    feature: ModelFeature
    limits: tuple[tuple[str, Any], ...]
    """Fields of `Capabilities`, each with a value that is intersected with the target's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Features of one target, or those that all of several targets have."""

    names: tuple[str, ...]
    """The targets that this describes."""
    release: str = ""
    """Release of the program; empty if it ships with moetune."""
    source: str = ""
    """Source of the facts; empty if it ships with moetune."""

    zero_stages: frozenset[int] = frozenset({0, 1, 2, 3})
    zero_stages_with_pipeline: frozenset[int] = frozenset({0, 1, 2, 3})
    """Stages allowed with more than one pipeline rank."""
    shard_ranks_zero_stages: frozenset[int] = frozenset({1, 2, 3})
    """Stages whose sharded state can have several copies (HSDP)."""
    gradient_bytes: frozenset[int] = frozenset({2, 4})
    """Choices of the bytes of a parameter's main gradient."""
    unsharded_gradient_bytes: frozenset[int] = frozenset({2, 4})
    """Choices of the bytes of a main gradient at zero_stage 0, for parameters in 16 bits or
    less."""
    optimizer_offload_zero_stages: frozenset[int] = frozenset({0, 1, 2, 3})
    """Stages whose optimizer state can be offloaded to host memory; empty: none."""
    host_checkpoint_zero_stages: frozenset[int] = frozenset({0, 1, 2, 3})
    """Stages whose state can be saved to the memory of nodes between checkpoints on shared storage,
    and restored from there; empty: none."""
    background_checkpoint_zero_stages: frozenset[int] = frozenset({0, 1, 2, 3})
    """Stages whose state can be written to shared storage while training goes on; empty: none."""
    pinned_checkpoints: bool = False
    """Checkpoints that are written while training goes on are copied into pinned memory, which the
    next one uses again, at the speed of the link between a device and its host."""
    in_process_restart_zero_stages: frozenset[int] = frozenset()
    """Stages whose training is told to restart without ending its processes; empty: none."""
    saves_before_time_limit: bool = False
    """A run inside a Slurm job can be told when to save to shared storage for the last time."""
    distributed_checkpoints: bool = True
    """Checkpoints are in PyTorch's distributed format, and loaded as profilers/checkpoint_load.py
    does."""
    saves_during_run: bool = True
    """Checkpoints are saved every so many steps, and training goes on from there; otherwise at the
    end, or never."""
    reshards: bool = True
    """Checkpoints on shared storage are restored in another layout of the same zero_stage, with the
    optimizer and without a conversion."""
    reshard_zero_stages_with_host_copies: frozenset[int] = frozenset({0, 1, 2, 3})
    """Stages whose checkpoints on shared storage can be restored in another layout even if there
    are checkpoints in the memory of nodes."""
    reshard_converters: frozenset[str] = frozenset()
    """Programs that have to convert a checkpoint first."""
    reshards_data_parallel: bool = True
    """A layout that restores a checkpoint may have another number of data-parallel replicas."""
    reshard_needs_expert_ranks: bool = False
    """A layout that restores a checkpoint needs expert parallelism above 1 in both layouts or in
    none."""
    overlap_grad_reduce: bool = True
    """Gradient reduction can overlap with the backward pass."""
    ddp_bucket_size: bool = True
    """The size of the gradient buckets can be set."""
    overlap_param_gather: bool = True
    """Parameter all-gather can overlap with the forward pass."""
    synchronizes_every_microbatch: bool = False
    """FSDP2 without deferred synchronisation: without a pipeline, every micro-batch gathers
    parameters and reduces gradients, at every zero_stage."""
    param_gather_needs_grad_reduce: bool = False
    """Overlapped all-gather needs overlapped gradient reduction and sharded optimizer state."""

    recompute: frozenset[Recompute] = frozenset(Recompute)
    recompute_modules: frozenset[str] = MODULES
    """Modules of selective recomputation."""
    recompute_num_layers: bool = True
    """Full recomputation can be limited to the first layers of every stage."""
    recompute_per_stage: bool = True
    activation_offload: Conditions | None = None
    """Saved activations can be offloaded to host memory; None: never."""
    packing: frozenset[str] = frozenset()
    """Rules by which documents are packed into rows whose attention keeps them apart
    (tuner/costs/train/packing.py); empty: none are."""
    packing_needs_single_rows: bool = False
    """Packed rows need micro-batches of one row, and no CUDA graphs."""
    largest_chunks: int = LARGEST_CHUNKS
    """Largest chunk count."""
    chunks_per_stage: bool = True
    chunks_need: frozenset[Recompute] = frozenset({Recompute.SELECTIVE, Recompute.FULL})
    """Recompute levels under which more than one chunk saves memory."""
    chunks_need_modules: frozenset[str] = frozenset()
    """Modules that selective recomputation must cover for more than one chunk."""

    schedules: frozenset[str] = SCHEDULES
    pipeline: bool = True
    """More than one pipeline rank is possible."""
    virtual_pipeline: bool = True
    unequal_microbatches: bool = False
    """Data-parallel replicas may run unequal numbers of micro-batches, without a virtual pipeline;
    in a pipeline those that an expert group spans run equal ones. Others divide the global batch by
    micro_batch_size * data_parallel_size: Megatron-LM (core/num_microbatches_calculator.py),
    torchtitan (trainer.py), DeepSpeed (runtime/config.py, `_batch_assertion`), Accelerate."""
    zero_bubble_needs_virtual_pipeline: bool = False
    context_parallel: bool = True
    tensor_parallel: bool = True
    expert_parallel: bool = True
    uneven_layout: bool = True
    """Stages may differ in their number of layers."""
    empty_stages: bool = True
    """A stage may hold no transformer layer."""
    tensor_with_pipeline: bool = True
    """Tensor and pipeline parallelism in one run."""
    tensor_beyond_kv_heads: bool = True
    """Tensor parallelism may exceed the key-value heads, which are then replicated."""
    sequence_parallel: bool = True
    """Sequence parallelism is possible."""
    sequence_parallel_optional: bool = True
    """Tensor parallelism without sequence parallelism is possible for dense layers."""
    moe_needs_sequence_parallel: bool = False
    """Tensor parallelism with MoE layers needs sequence parallelism."""
    rank_orders: frozenset[str] = frozenset({DEFAULT_RANK_ORDER, PIPELINE_INSIDE_ORDER})

    expert_tensor_parallel: bool = True
    """Degrees above 1; 1 is always possible."""
    expert_folding: bool = True
    """Expert parallelism may exceed data parallelism."""
    expert_folding_needs_sharding: bool = False
    """Whether expert parallelism uses context and tensor ranks only at zero_stage 0."""
    moe_tensor_needs_experts: bool = False
    """Tensor parallelism of a MoE model needs expert parallelism."""
    moe_offload_needs_one_tensor_rank: bool = False
    """No optimizer offload for MoE models under tensor parallelism."""
    ragged_experts: bool = False
    """Experts multiply rows as they fall, not in whole blocks."""
    dispatchers: frozenset[str] = DISPATCHERS
    dispatchers_with_pipeline: frozenset[str] = DISPATCHERS
    fp8_dispatch: bool = False
    """Dispatch sends activations and gradients in fp8, with a scale a block, where experts compute
    in fp8; combine stays in 16 bits. DeepSeek-V3's own trainer does (arXiv:2412.19437, section
    3.3.3). DeepEP takes such a pair; Megatron-LM hands it one bf16 tensor (its issue 3578)."""
    a2a_overlap: Conditions | None = None
    """Dispatch and combine can overlap with another micro-batch's computation; None: never."""

    cuda_graphs: frozenset[str] = GRAPHS
    cuda_graphs_with_pipeline: frozenset[str] = GRAPHS
    full_graph_dispatchers: frozenset[str] = DISPATCHERS
    """Dispatchers with the fixed sizes that a full-iteration graph of MoE layers needs."""
    partial_graph_recompute: frozenset[Recompute] = frozenset(Recompute)
    partial_graph_excludes: frozenset[str] = frozenset()
    """Modules that a launch with partial CUDA graphs cannot recompute."""

    precisions: frozenset[str] = PRECISIONS
    delayed_scaling_excludes: frozenset[str] = frozenset()
    """Modules that fp8-delayed cannot recompute."""
    adapters: frozenset[str] = ADAPTERS
    """Methods of training adapters beside frozen weights; empty: all weights are trained."""
    adapter_targets: frozenset[str] = frozenset(ADAPTER_TARGETS)
    """Matrices that can have an adapter."""
    networks_become_experts: frozenset[str] = frozenset()
    """Architectures in which an adapter of dense or shared networks would be one of the experts."""
    fused_layers: frozenset[tuple[str, ...]] = frozenset()
    """Matrices that are one layer, and have adapters together or not at all."""
    adapter_dtypes: frozenset[str] = frozenset({"fp32", "bf16"})
    """Types of adapters, their gradients and moments."""
    adapter_limits: frozenset[tuple[str, Any]] = frozenset()
    """Fields of `Capabilities` with the values that are left where adapters are trained."""
    rank_splitting_targets: frozenset[str] = frozenset()
    """Matrices whose tensor ranks split the rank of their adapters, and must divide it."""
    rank_over_tensor: int = 0
    """Rank that tensor ranks split where adapters are trained; 0: none."""
    rank_over_expert_tensor: int = 0
    """Rank that the tensor ranks of experts split where adapters are trained; 0: none."""
    frozen_in_compute_type: bool = True
    """Frozen weights are kept in the type of the computation, and whole below zero_stage 3."""
    quantised_zero_stages: frozenset[int] = frozenset({0, 1, 2, 3})
    """Stages that frozen weights in 4 bits allow."""
    mtp: bool = True
    """Multi-token-prediction layers."""
    tied_embeddings_with_pipeline: bool = True
    one_bias_switch_is_needed: bool = False
    """Biases are everywhere or nowhere, except those of queries, keys and values, and experts with
    biases are not split."""
    unsupported: frozenset[ModelFeature] = frozenset()
    unsupported_reasons: frozenset[tuple[ModelFeature, str]] = frozenset()
    """Reasons by feature that the target may have but that is not planned for it."""
    restrictions: frozenset[Restriction] = frozenset()
    """Narrower limits for models with a feature."""
    parts: tuple["Capabilities", ...] = ()
    """The targets of an intersection, so that a refusal can name one."""
    without_adapters: "Capabilities | None" = None
    """Features where all weights are trained, so that a refusal can name the adapters; None: the
    same."""


CONDITIONAL: Final[dict[str, Any]] = {
    "activation_offload": Conditions(),
    "a2a_overlap": Conditions(needs_experts=True),
}
"""Features that a target has under conditions, and the least that any target asks.

A decision has a switch of the same name.
"""


def anything(name: str) -> Capabilities:
    """Return a manifest without limits."""
    return Capabilities(names=(name,), unequal_microbatches=True, fp8_dispatch=True, **CONDITIONAL)


def restricted(*names: ModelFeature, **limits: Any) -> frozenset[Restriction]:
    """Return the same limits for each of the features."""
    return frozenset(
        Restriction(feature=name, limits=tuple(sorted(limits.items()))) for name in names
    )


def restrict(target: Capabilities, limits: Iterable[tuple[str, Any]]) -> Capabilities:
    """Return what a target can express under narrower limits of some fields."""
    narrower = {name: _join(name, getattr(target, name), value) for name, value in limits}
    return replace(target, **narrower)


def of_model(target: Capabilities, model_features: Iterable[ModelFeature]) -> Capabilities:
    """Return what a target can express of models with these features."""
    present = frozenset(model_features)
    narrowed = replace(target, parts=tuple(of_model(part, present) for part in target.parts))
    for restriction in target.restrictions:
        if restriction.feature in present:
            narrowed = restrict(narrowed, restriction.limits)
    return narrowed


def with_gradients(target: Capabilities, *, gradient_bytes: int, precision: str) -> Capabilities:
    """Return what a target can express with main gradients of this size."""
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


def with_adapters(target: Capabilities, adapters: Adapters | None) -> Capabilities:
    """Return what a target can express when it trains adapters; None: all weights."""
    if adapters is None:
        return target
    able = restrict(target, target.adapter_limits)
    if adapters.is_quantised:
        able = restrict(able, (("zero_stages", target.quantised_zero_stages),))
    split = target.rank_splitting_targets & members(adapters)
    return replace(
        able,
        rank_over_tensor=adapters.rank if split - {EXPERTS} else 0,
        rank_over_expert_tensor=adapters.rank if EXPERTS in split else 0,
        parts=tuple(with_adapters(part, adapters) for part in target.parts),
        without_adapters=target,
    )


def intersect(first: Capabilities, second: Capabilities) -> Capabilities:
    """Return what both can express."""
    values = {
        field.name: _join(field.name, getattr(first, field.name), getattr(second, field.name))
        for field in fields(Capabilities)
        if field.name not in ("names", "release", "source", "parts", "without_adapters")
    }
    return Capabilities(
        names=first.names + second.names,
        parts=(*(first.parts or (first,)), *(second.parts or (second,))),
        **values,
    )


def _join(name: str, first: Any, second: Any) -> Any:
    if first is None or second is None:
        return None
    if isinstance(first, Conditions):
        return Conditions(
            **{
                field.name: _join(
                    field.name, getattr(first, field.name), getattr(second, field.name)
                )
                for field in fields(Conditions)
            }
        )
    if isinstance(first, bool):
        return first or second if "need" in name else first and second
    if isinstance(first, int):
        return min(first, second)
    return first | second if name in _FORBID else first & second
