"""Rules on sharding, recomputation, offloading, overlap, precision and CUDA graphs.

One line per broken rule, with the way out.
"""

from collections.abc import Iterator

from profilers.steps.config import LayerKind, Recompute
from tuner.catalog.manifest import CONDITIONAL, Capabilities, Conditions
from tuner.catalog.rules.decision import (
    global_chunks,
    global_recompute,
    recomputed,
    stage_kinds,
)
from tuner.catalog.rules.words import listed
from tuner.config.train import TrainDecision
from tuner.spec.model import ModelSpec


def broken(target: Capabilities, model: ModelSpec, decision: TrainDecision) -> Iterator[str]:
    """Yield every rule of this kind that the decision breaks."""
    yield from _state(target, decision)
    yield from _recompute(target, model, decision)
    yield from _delayed_scaling(target, model, decision)
    yield from _chunks(target, model, decision)
    yield from _conditional(target, model, decision)
    yield from _graphs(target, model, decision)


def _state(target: Capabilities, decision: TrainDecision) -> Iterator[str]:
    stage = decision.zero_stage
    if stage not in target.zero_stages:
        yield f"zero_stage {stage} is not one of {listed(target.zero_stages)}"
    elif (
        decision.pipeline_model_parallel_size > 1 and stage not in target.zero_stages_with_pipeline
    ):
        yield (
            f"zero_stage {stage} needs pipeline_model_parallel_size 1; "
            f"with a pipeline one of {listed(target.zero_stages_with_pipeline)}"
        )
    if decision.shard_ranks is not None and stage not in target.shard_ranks_zero_stages:
        stages = target.shard_ranks_zero_stages
        yield "shard_ranks " + (
            f"needs zero_stage {listed(stages, joiner=' or ')}" if stages else "is not offered"
        )
    if decision.gradient_bytes not in target.gradient_bytes:
        allowed = listed(target.gradient_bytes)
        yield f"gradient_bytes {decision.gradient_bytes} is not one of {allowed}"
    if decision.optimizer_offload and stage not in target.optimizer_offload_zero_stages:
        stages = target.optimizer_offload_zero_stages
        yield "optimizer_offload " + (
            f"needs zero_stage {listed(stages, joiner=' or ')}" if stages else "is not offered"
        )
    if decision.overlap_grad_reduce and not target.overlap_grad_reduce:
        yield "overlap_grad_reduce is not offered"
    if decision.ddp_bucket_size is not None:
        yield from _buckets(target, decision)
    if decision.overlap_param_gather and not target.overlap_param_gather:
        yield "overlap_param_gather is not offered"
    elif (
        decision.overlap_param_gather
        and target.param_gather_needs_grad_reduce
        and not (decision.overlap_grad_reduce and stage)
    ):
        yield "overlap_param_gather needs overlap_grad_reduce and zero_stage 1 or more"


def _buckets(target: Capabilities, decision: TrainDecision) -> Iterator[str]:
    if not target.ddp_bucket_size:
        yield "ddp_bucket_size is not offered"
    if not decision.overlap_grad_reduce:
        yield "ddp_bucket_size needs overlap_grad_reduce"
    if decision.zero_stage > 1:
        yield "ddp_bucket_size needs zero_stage 0 or 1"


def _recompute(target: Capabilities, model: ModelSpec, decision: TrainDecision) -> Iterator[str]:
    levels = set(decision.stage_recompute)
    for level in sorted(levels - target.recompute):
        yield f"recompute {level} is not one of {listed(target.recompute)}"
    if global_recompute(model, decision) is None and not target.recompute_per_stage:
        yield "recompute is one setting for the whole model; all stages must agree"
    modules = recomputed(model, decision)
    if Recompute.SELECTIVE in target.recompute and modules - target.recompute_modules:
        yield (
            f"cannot recompute {listed(modules - target.recompute_modules)} alone; "
            f"recompute_modules may hold {listed(target.recompute_modules)}"
        )
    if "mla_up_proj" in modules and model.attention.kind != "mla":
        yield "recompute_modules mla_up_proj needs latent attention"
    if "moe_act" in modules and not model.num_moe_layers:
        yield "recompute_modules moe_act needs a model with experts"
    if decision.recompute_num_layers is not None:
        if not target.recompute_num_layers:
            yield "recomputes all layers of a stage or none; recompute_num_layers must be absent"
        elif levels != {Recompute.FULL}:
            yield "recompute_num_layers needs recompute full on every stage"


def _delayed_scaling(
    target: Capabilities, model: ModelSpec, decision: TrainDecision
) -> Iterator[str]:
    excluded = recomputed(model, decision) & target.delayed_scaling_excludes
    if decision.fp8_recipe == "fp8-delayed" and excluded:
        yield f"fp8-delayed cannot recompute {listed(excluded)}; another fp8_recipe can"


def _chunks(target: Capabilities, model: ModelSpec, decision: TrainDecision) -> Iterator[str]:
    if global_chunks(model, decision) is None and not target.chunks_per_stage:
        yield "the chunk count is one setting for the whole model; all stages must agree"
    chunked = [
        (chunks, level)
        for chunks, level, kinds in zip(
            decision.chunks, decision.stage_recompute, stage_kinds(model, decision), strict=True
        )
        if chunks > 1 and LayerKind.MOE in kinds
    ]
    largest = max((chunks for chunks, _ in chunked), default=1)
    if largest > target.largest_chunks:
        yield f"chunks {largest} exceeds {target.largest_chunks}" + (
            f" ({target.release})" if target.release else ""
        )
    if any(level not in target.chunks_need for _, level in chunked):
        yield f"more than one chunk needs recompute {listed(target.chunks_need, joiner=' or ')}"
    missing = target.chunks_need_modules - recomputed(model, decision)
    if any(level is Recompute.SELECTIVE for _, level in chunked) and missing:
        yield f"more than one chunk needs recompute_modules {listed(missing)}"


def _conditional(target: Capabilities, model: ModelSpec, decision: TrainDecision) -> Iterator[str]:
    for feature in CONDITIONAL:
        if not getattr(decision, feature):
            continue
        conditions = getattr(target, feature)
        if conditions is None:
            yield f"{feature} is not offered"
            continue
        unmet = (*_beside(conditions, model, decision), *_in_a_pipeline(conditions, decision))
        yield from (f"{feature} {reason}" for reason in unmet)


def _beside(conditions: Conditions, model: ModelSpec, decision: TrainDecision) -> Iterator[str]:
    has_experts = model.num_moe_layers and decision.expert_model_parallel_size > 1
    if conditions.needs_experts and not has_experts:
        yield "needs expert_model_parallel_size above 1"
    if decision.dispatcher not in conditions.dispatchers:
        yield f"needs dispatcher {listed(conditions.dispatchers)}"
    if set(decision.stage_recompute) - conditions.recompute:
        yield f"needs recompute {listed(conditions.recompute)}"
    if recomputed(model, decision) & conditions.excludes:
        yield (f"cannot recompute {listed(conditions.excludes)}; take it out of recompute_modules")
    if decision.cuda_graph not in conditions.cuda_graphs:
        yield f"needs cuda_graph {listed(conditions.cuda_graphs)}"


def _in_a_pipeline(conditions: Conditions, decision: TrainDecision) -> Iterator[str]:
    pipeline = decision.pipeline_model_parallel_size > 1
    is_virtual = decision.virtual_pipeline_model_parallel_size > 1
    if conditions.needs_virtual_pipeline and pipeline and not is_virtual:
        yield "with a pipeline needs virtual_pipeline_model_parallel_size above 1"
    if decision.mtp_num_layers > conditions.largest_mtp:
        yield f"needs mtp_num_layers {conditions.largest_mtp} at most"
    if decision.mtp_num_layers and not pipeline and conditions.mtp_needs_pipeline:
        yield "with mtp_num_layers needs pipeline_model_parallel_size above 1"


def _graphs(target: Capabilities, model: ModelSpec, decision: TrainDecision) -> Iterator[str]:
    graph = decision.cuda_graph
    if decision.fp8_recipe and decision.fp8_recipe not in target.precisions:
        yield f"fp8_recipe {decision.fp8_recipe!r} is not one of {listed(target.precisions)}"
    if graph not in target.cuda_graphs:
        yield f"cuda_graph {graph} is not one of {listed(target.cuda_graphs)}"
        return
    if decision.pipeline_model_parallel_size > 1 and graph not in target.cuda_graphs_with_pipeline:
        yield f"cuda_graph {graph} needs pipeline_model_parallel_size 1"
    if (
        graph == "full_iteration"
        and model.num_moe_layers
        and decision.dispatcher not in target.full_graph_dispatchers
    ):
        allowed = target.full_graph_dispatchers
        yield "cuda_graph full_iteration " + (
            f"with experts needs dispatcher {listed(allowed)}"
            if allowed
            else "needs a model without experts"
        )
    if graph != "partial":
        return
    if set(decision.stage_recompute) - target.partial_graph_recompute:
        yield f"cuda_graph partial needs recompute {listed(target.partial_graph_recompute)}"
    if recomputed(model, decision) & target.partial_graph_excludes:
        yield (
            f"cuda_graph partial cannot recompute {listed(target.partial_graph_excludes)}; "
            "take it out of recompute_modules"
        )
