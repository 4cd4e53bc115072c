"""Settings of a training decision that are common to all stages.

Some targets have one setting for the whole model where a decision has one per stage; `global_*`
returns the one setting that expresses all of them, if any.
"""

from collections.abc import Iterator

from profilers.steps.config import LayerKind, Recompute
from tuner.config.train import TrainDecision
from tuner.spec.model import ModelSpec


def global_recompute(model: ModelSpec, decision: TrainDecision) -> Recompute | None:
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


def global_chunks(model: ModelSpec, decision: TrainDecision) -> int | None:
    """Return the one chunk count of all MoE layers, 1 without any; None if stages differ."""
    counts = {
        chunks
        for chunks, kinds in zip(decision.chunks, stage_kinds(model, decision), strict=True)
        if LayerKind.MOE in kinds
    }
    return counts.pop() if len(counts) == 1 else None if counts else 1


def selective_modules(decision: TrainDecision) -> tuple[str, ...]:
    """Return the modules of selective recomputation; the MoE layer by default."""
    return decision.recompute_modules or ("moe",)


def recomputed(model: ModelSpec, decision: TrainDecision) -> frozenset[str]:
    """Return the modules that any stage recomputes selectively; without `moe` for dense models."""
    if Recompute.SELECTIVE not in decision.stage_recompute:
        return frozenset()
    modules = frozenset(selective_modules(decision))
    return modules if model.num_moe_layers else modules - {"moe"}


def stage_kinds(model: ModelSpec, decision: TrainDecision) -> Iterator[tuple[LayerKind, ...]]:
    """Yield the layers of each stage, in execution order."""
    start = 0
    for count in decision.pipeline_layout:
        yield model.layers[start : start + count]
        start += count
