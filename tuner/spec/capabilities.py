"""What each launch target can express; a knob that a target lacks is not searched for it.

A target is a program (`reference`, `megatron-lm`, ...) or a wrapper that starts one (`slurm`). A
wrapper limits nothing. `intersection` is what all named targets can express, `refusals` says
which rules a decision breaks, one line each.

The megatron-lm rows were read from the argument parsers and `TransformerConfig` of the tags
core_v0.16.1, core_v0.18.0 and core_v0.19.0 of github.com/NVIDIA/Megatron-LM. Two rules that
matter most here:

- `--mlp-chunks-for-training` exists from core 0.18 on. The chunks of a MoE layer are recomputed one
  by one only under `--recompute-modules moe`; inside full recomputation they save nothing.
- `--recompute-granularity` and the chunk count are global, so stages cannot differ in them.

Not covered: rules that hold for every target (degrees dividing heads, experts, layers or the
batch); those belong to the enumeration of candidates. Megatron's own FSDP and torch FSDP2.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Final, Protocol

from profilers.steps.config import LayerKind, Recompute
from tuner.errors import UnknownTargetError
from tuner.spec.features import ModelFeature, features
from tuner.spec.model import ModelSpec

LARGEST_CHUNKS: Final = 64
"""Chunk counts above this leave an expert too few rows to multiply; no target needs more."""

DEFAULT_PROGRAM: Final = "reference"
"""What a wrapper starts when no program is named beside it."""


class Decision(Protocol):
    """What is read from a training decision; `tuner.plan.TrainDecision` has it."""

    @property
    def tensor_model_parallel_size(self) -> int: ...
    @property
    def pipeline_model_parallel_size(self) -> int: ...
    @property
    def virtual_pipeline_model_parallel_size(self) -> int: ...
    @property
    def context_parallel_size(self) -> int: ...
    @property
    def data_parallel_size(self) -> int: ...
    @property
    def expert_model_parallel_size(self) -> int: ...
    @property
    def expert_tensor_parallel_size(self) -> int: ...
    @property
    def sequence_parallel(self) -> bool: ...
    @property
    def zero_stage(self) -> int: ...
    @property
    def a2a_overlap(self) -> bool: ...
    @property
    def stage_recompute(self) -> tuple[Recompute, ...]: ...
    @property
    def chunks(self) -> tuple[int, ...]: ...
    @property
    def pipeline_layout(self) -> tuple[int, ...]: ...
    @property
    def mtp_num_layers(self) -> int: ...
    @property
    def fp8_recipe(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one target, or every one of several, can express."""

    names: tuple[str, ...]
    """The targets that this speaks for."""
    release: str = ""
    """Of the program; empty where it ships with the product."""
    zero_stages: frozenset[int] = frozenset({0, 1, 2, 3})
    zero_stages_with_pipeline: frozenset[int] = frozenset({0, 1, 2, 3})
    """Those left when there is more than one pipeline rank."""
    recompute: frozenset[Recompute] = frozenset(Recompute)
    recompute_per_stage: bool = True
    largest_chunks: int = LARGEST_CHUNKS
    """Any integer from 1 to this can be a chunk count."""
    chunks_per_stage: bool = True
    chunks_need: frozenset[Recompute] = frozenset({Recompute.SELECTIVE, Recompute.FULL})
    """Recompute levels under which more than one chunk saves memory."""
    virtual_pipeline: bool = True
    context_parallel: bool = True
    uneven_layout: bool = True
    """Stages may differ in their number of layers."""
    empty_stages: bool = True
    """A stage may hold no transformer layer."""
    expert_tensor_parallel: bool = True
    """Above 1; 1 is always possible."""
    expert_folding: bool = True
    """Expert parallelism may exceed data parallelism."""
    tensor_beyond_kv_heads: bool = True
    """Tensor parallelism may exceed the key-value heads, which are then replicated."""
    sequence_parallel_optional: bool = True
    """Tensor parallelism without sequence parallelism is possible for dense layers."""
    moe_needs_sequence_parallel: bool = False
    """Tensor parallelism with MoE layers needs sequence parallelism."""
    a2a_overlap: bool = True
    precisions: frozenset[str] = frozenset({"bf16", "fp32", "fp8"})
    mtp: bool = True
    """Multi-token-prediction layers."""
    tied_embeddings_with_pipeline: bool = True
    unsupported: frozenset[ModelFeature] = frozenset()
    parts: tuple["Capabilities", ...] = ()
    """The single targets that an intersection was made of, so that a refusal can name one."""


_MEGATRON_0_18: Final = Capabilities(
    names=("megatron-lm",),
    release="core 0.18 and later",
    zero_stages=frozenset({0, 1}),
    zero_stages_with_pipeline=frozenset({0, 1}),
    recompute_per_stage=False,
    chunks_per_stage=False,
    chunks_need=frozenset({Recompute.SELECTIVE}),
    moe_needs_sequence_parallel=True,
    # The flag exists, but it forbids recomputing the MoE layer and nothing prices it yet.
    a2a_overlap=False,
    precisions=frozenset({"bf16"}),
    unsupported=frozenset(
        {
            ModelFeature.MLA_BIAS,
            ModelFeature.OUTPUT_BIAS,
            ModelFeature.QK_NORM_FULL,
            ModelFeature.SINKS,
            ModelFeature.SLIDING_WINDOW,
            ModelFeature.UNGATED_FFN,
            ModelFeature.FFN_BIAS,
            ModelFeature.EXPERT_BIAS,
            ModelFeature.ROUTER_BIAS,
            ModelFeature.SIGMOID_UNNORMALISED,
            ModelFeature.SOFTMAX_CORRECTION,
        }
    ),
)

_MEGATRON_0_16: Final = Capabilities(
    names=("megatron-lm-0.16",),
    release="core 0.16 and 0.17",
    zero_stages=_MEGATRON_0_18.zero_stages,
    zero_stages_with_pipeline=_MEGATRON_0_18.zero_stages_with_pipeline,
    recompute_per_stage=False,
    largest_chunks=1,
    chunks_per_stage=False,
    chunks_need=_MEGATRON_0_18.chunks_need,
    moe_needs_sequence_parallel=True,
    a2a_overlap=False,
    precisions=_MEGATRON_0_18.precisions,
    unsupported=_MEGATRON_0_18.unsupported,
)


def _reference(name: str) -> Capabilities:
    return Capabilities(
        names=(name,),
        zero_stages=frozenset({0, 1, 3}),
        zero_stages_with_pipeline=frozenset({0, 1}),
        context_parallel=False,
        expert_tensor_parallel=False,
        tensor_beyond_kv_heads=False,
        sequence_parallel_optional=False,
        moe_needs_sequence_parallel=True,
        a2a_overlap=False,
        precisions=frozenset({"bf16", "fp32"}),
        mtp=False,
        tied_embeddings_with_pipeline=False,
        unsupported=frozenset(ModelFeature),
    )


TARGETS: Final[Mapping[str, Capabilities]] = {
    "reference": _reference("reference"),
    # The same program; the name says what its script starts it with.
    "torchrun": _reference("torchrun"),
    "megatron-lm": _MEGATRON_0_18,
    "megatron-lm-0.16": _MEGATRON_0_16,
    "slurm": Capabilities(names=("slurm",)),
}

WRAPPERS: Final = frozenset({"slurm"})
"""Targets that start another target's program."""


def programs(targets: Iterable[str]) -> tuple[str, ...]:
    """Return the targets that are programs, in order; the default one when only wrappers are named.

    Raises:
        UnknownTargetError: a name is not in `TARGETS`.
    """
    named = tuple(targets)
    for name in named:
        _target(name)
    found = tuple(name for name in dict.fromkeys(named) if name not in WRAPPERS)
    return found or (DEFAULT_PROGRAM,)


def intersection(targets: Iterable[str]) -> Capabilities:
    """Return what every one of the targets can express.

    Raises:
        UnknownTargetError: a name is not in `TARGETS`.
    """
    named = tuple(dict.fromkeys(targets))
    wrappers = (name for name in named if name in WRAPPERS)
    parts = tuple(_target(name) for name in (*programs(named), *wrappers))
    return parts[0] if len(parts) == 1 else reduce(_both, parts)


def refusals(
    capabilities: Capabilities, *, model: ModelSpec, decision: Decision
) -> tuple[str, ...]:
    """Say why the decision cannot be launched, one line per broken rule; empty when it can."""
    return tuple(
        f"{part.names[0]}: {rule}"
        for part in capabilities.parts or (capabilities,)
        for broken in (
            _model(part, model),
            _degrees(part, model, decision),
            _state(part, decision),
            _stages(part, model, decision),
            _extras(part, model, decision),
        )
        for rule in broken
    )


def global_recompute(model: ModelSpec, decision: Decision) -> Recompute | None:
    """Return the one recompute level that says the same as all stages do; None when there is none.

    Selective recomputation is about experts only, so on a stage without MoE layers it is the same
    as none, and a stage without layers agrees with everything.
    """
    fitting = set(Recompute)
    for level, kinds in zip(decision.stage_recompute, _kinds(model, decision), strict=True):
        if not kinds:
            continue
        same = level is not Recompute.FULL and LayerKind.MOE not in kinds
        fitting &= {Recompute.NONE, Recompute.SELECTIVE} if same else {level}
    return next((level for level in Recompute if level in fitting), None)


def global_chunks(model: ModelSpec, decision: Decision) -> int | None:
    """Return the one chunk count of every MoE layer, 1 without any; None when stages differ."""
    counts = {
        chunks
        for chunks, kinds in zip(decision.chunks, _kinds(model, decision), strict=True)
        if LayerKind.MOE in kinds
    }
    return counts.pop() if len(counts) == 1 else None if counts else 1


def _target(name: str) -> Capabilities:
    if name not in TARGETS:
        raise UnknownTargetError(
            f"emit: no target is named {name!r}; there are {', '.join(TARGETS)}"
        )
    return TARGETS[name]


def _both(one: Capabilities, other: Capabilities) -> Capabilities:
    return Capabilities(
        names=one.names + other.names,
        zero_stages=one.zero_stages & other.zero_stages,
        zero_stages_with_pipeline=one.zero_stages_with_pipeline & other.zero_stages_with_pipeline,
        recompute=one.recompute & other.recompute,
        recompute_per_stage=one.recompute_per_stage and other.recompute_per_stage,
        largest_chunks=min(one.largest_chunks, other.largest_chunks),
        chunks_per_stage=one.chunks_per_stage and other.chunks_per_stage,
        chunks_need=one.chunks_need & other.chunks_need,
        virtual_pipeline=one.virtual_pipeline and other.virtual_pipeline,
        context_parallel=one.context_parallel and other.context_parallel,
        uneven_layout=one.uneven_layout and other.uneven_layout,
        empty_stages=one.empty_stages and other.empty_stages,
        expert_tensor_parallel=one.expert_tensor_parallel and other.expert_tensor_parallel,
        expert_folding=one.expert_folding and other.expert_folding,
        tensor_beyond_kv_heads=one.tensor_beyond_kv_heads and other.tensor_beyond_kv_heads,
        sequence_parallel_optional=(
            one.sequence_parallel_optional and other.sequence_parallel_optional
        ),
        moe_needs_sequence_parallel=(
            one.moe_needs_sequence_parallel or other.moe_needs_sequence_parallel
        ),
        a2a_overlap=one.a2a_overlap and other.a2a_overlap,
        precisions=one.precisions & other.precisions,
        mtp=one.mtp and other.mtp,
        tied_embeddings_with_pipeline=(
            one.tied_embeddings_with_pipeline and other.tied_embeddings_with_pipeline
        ),
        unsupported=one.unsupported | other.unsupported,
        parts=(*(one.parts or (one,)), *(other.parts or (other,))),
    )


def _kinds(model: ModelSpec, decision: Decision) -> Iterator[tuple[LayerKind, ...]]:
    """Yield the layers of each stage, in execution order."""
    start = 0
    for count in decision.pipeline_layout:
        yield model.layers[start : start + count]
        start += count


def _model(target: Capabilities, model: ModelSpec) -> Iterator[str]:
    for feature in sorted(features(model) & target.unsupported):
        yield f"no arguments are written for {feature} ({model.architecture})"


def _degrees(target: Capabilities, model: ModelSpec, decision: Decision) -> Iterator[str]:
    tensor = decision.tensor_model_parallel_size
    if decision.virtual_pipeline_model_parallel_size > 1 and not target.virtual_pipeline:
        yield "has no interleaved pipeline; virtual_pipeline_model_parallel_size must be 1"
    if decision.context_parallel_size > 1 and not target.context_parallel:
        yield "has no context parallelism; context_parallel_size must be 1"
    if decision.expert_tensor_parallel_size > 1 and not target.expert_tensor_parallel:
        yield "does not split one expert; expert_tensor_parallel_size must be 1"
    if (
        decision.expert_model_parallel_size > decision.data_parallel_size
        and not target.expert_folding
    ):
        yield "expert_model_parallel_size must not exceed data_parallel_size"
    if model.attention.num_kv_heads % tensor and not target.tensor_beyond_kv_heads:
        yield (
            f"tensor_model_parallel_size {tensor} must divide the "
            f"{model.attention.num_kv_heads} key-value heads"
        )
    if tensor > 1 and not decision.sequence_parallel:
        if not target.sequence_parallel_optional:
            yield "always splits the sequence over the tensor ranks; sequence_parallel must be true"
        elif model.num_moe_layers and target.moe_needs_sequence_parallel:
            yield "MoE layers under tensor parallelism need sequence_parallel"


def _state(target: Capabilities, decision: Decision) -> Iterator[str]:
    stage = decision.zero_stage
    if stage not in target.zero_stages:
        yield f"zero_stage {stage} is not one of {_list(target.zero_stages)}"
    elif (
        decision.pipeline_model_parallel_size > 1 and stage not in target.zero_stages_with_pipeline
    ):
        yield (
            f"zero_stage {stage} needs pipeline_model_parallel_size 1; "
            f"with a pipeline one of {_list(target.zero_stages_with_pipeline)}"
        )


def _stages(target: Capabilities, model: ModelSpec, decision: Decision) -> Iterator[str]:
    layout = decision.pipeline_layout
    if len(set(layout)) > 1 and not target.uneven_layout:
        yield f"every stage must hold the same number of layers, not {_list(set(layout))}"
    if 0 in layout and not target.empty_stages:
        yield "every stage must hold a layer"
    for level in sorted(set(decision.stage_recompute) - target.recompute):
        yield f"recompute {level} is not one of {_list(target.recompute)}"
    if global_recompute(model, decision) is None and not target.recompute_per_stage:
        yield "recompute is one setting for the whole model; all stages must agree"
    if global_chunks(model, decision) is None and not target.chunks_per_stage:
        yield "the chunk count is one setting for the whole model; all stages must agree"
    chunked = [
        (chunks, level)
        for chunks, level, kinds in zip(
            decision.chunks, decision.stage_recompute, _kinds(model, decision), strict=True
        )
        if chunks > 1 and LayerKind.MOE in kinds
    ]
    largest = max((chunks for chunks, _ in chunked), default=1)
    if largest > target.largest_chunks:
        yield f"chunks {largest} exceeds {target.largest_chunks}" + (
            f" ({target.release})" if target.release else ""
        )
    if any(level not in target.chunks_need for _, level in chunked):
        yield f"more than one chunk needs recompute {_list(target.chunks_need, joiner=' or ')}"


def _extras(target: Capabilities, model: ModelSpec, decision: Decision) -> Iterator[str]:
    if decision.a2a_overlap and not target.a2a_overlap:
        yield "a2a_overlap is not offered"
    if decision.fp8_recipe and "fp8" not in target.precisions:
        yield f"fp8_recipe {decision.fp8_recipe!r} needs fp8, it has {_list(target.precisions)}"
    if decision.mtp_num_layers and not target.mtp:
        yield "has no multi-token prediction; mtp_num_layers must be 0"
    if (
        model.tie_word_embeddings
        and decision.pipeline_model_parallel_size > 1
        and not target.tied_embeddings_with_pipeline
    ):
        yield "tied embeddings need pipeline_model_parallel_size 1"


def _list(values: Iterable[object], *, joiner: str = ", ") -> str:
    return joiner.join(str(value) for value in sorted(values, key=str))
