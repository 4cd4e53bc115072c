"""The fields of a training decision that rules read, and settings common to all stages.

Some targets have one setting for the whole model where a decision has one per stage; `global_*`
returns the one setting that expresses all of them, if any.
"""

from collections.abc import Iterator
from typing import Protocol

from profilers.steps.config import LayerKind, Recompute
from tuner.spec.model import ModelSpec


class Decision(Protocol):
    """The fields of `tuner.config.train.TrainDecision` that rules read."""

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
    def shard_ranks(self) -> int | None: ...
    @property
    def gradient_bytes(self) -> int: ...
    @property
    def overlap_grad_reduce(self) -> bool: ...
    @property
    def ddp_bucket_size(self) -> int | None: ...
    @property
    def overlap_param_gather(self) -> bool: ...
    @property
    def optimizer_offload(self) -> bool: ...
    @property
    def activation_offload(self) -> bool: ...
    @property
    def dispatcher(self) -> str: ...
    @property
    def a2a_overlap(self) -> bool: ...
    @property
    def recompute_modules(self) -> tuple[str, ...]: ...
    @property
    def recompute_num_layers(self) -> int | None: ...
    @property
    def stage_recompute(self) -> tuple[Recompute, ...]: ...
    @property
    def chunks(self) -> tuple[int, ...]: ...
    @property
    def pipeline_layout(self) -> tuple[int, ...]: ...
    @property
    def schedule(self) -> str | None: ...
    @property
    def rank_order(self) -> str: ...
    @property
    def cuda_graph(self) -> str: ...
    @property
    def mtp_num_layers(self) -> int: ...
    @property
    def fp8_recipe(self) -> str: ...


def global_recompute(model: ModelSpec, decision: Decision) -> Recompute | None:
    """Return the one recompute level that is equivalent to all stages' levels; None without one.

    Recomputing experts only is equivalent to none on a stage without MoE layers, and a stage
    without layers agrees with any level.
    """
    of_experts = set(selective_modules(decision)) == {"moe"}
    fitting = set(Recompute)
    for level, kinds in zip(decision.stage_recompute, stage_kinds(model, decision), strict=True):
        if not kinds:
            continue
        same = of_experts and level is not Recompute.FULL and LayerKind.MOE not in kinds
        fitting &= {Recompute.NONE, Recompute.SELECTIVE} if same else {level}
    return next((level for level in Recompute if level in fitting), None)


def global_chunks(model: ModelSpec, decision: Decision) -> int | None:
    """Return the one chunk count of all MoE layers, 1 without any; None if stages differ."""
    counts = {
        chunks
        for chunks, kinds in zip(decision.chunks, stage_kinds(model, decision), strict=True)
        if LayerKind.MOE in kinds
    }
    return counts.pop() if len(counts) == 1 else None if counts else 1


def selective_modules(decision: Decision) -> tuple[str, ...]:
    """Return the modules of selective recomputation; the MoE layer by default."""
    return decision.recompute_modules or ("moe",)


def recomputed(model: ModelSpec, decision: Decision) -> frozenset[str]:
    """Return the modules that any stage recomputes selectively; without `moe` for dense models."""
    if Recompute.SELECTIVE not in decision.stage_recompute:
        return frozenset()
    modules = frozenset(selective_modules(decision))
    return modules if model.num_moe_layers else modules - {"moe"}


def stage_kinds(model: ModelSpec, decision: Decision) -> Iterator[tuple[LayerKind, ...]]:
    """Yield the layers of each stage, in execution order."""
    start = 0
    for count in decision.pipeline_layout:
        yield model.layers[start : start + count]
        start += count
