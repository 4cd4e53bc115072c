"""Rules on models, degrees, pipelines and expert layouts.

One line per broken rule, with the way out.
"""

from collections.abc import Iterator

from profilers.steps.config import LayerKind
from tuner.catalog.manifest import Capabilities
from tuner.catalog.rules.words import listed
from tuner.config.train import TrainDecision
from tuner.spec.features import ModelFeature, features
from tuner.spec.linear_attention import LinearName, splits_heads
from tuner.spec.model import ModelSpec


def broken(target: Capabilities, model: ModelSpec, decision: TrainDecision) -> Iterator[str]:
    """Yield every rule of this kind that the decision breaks."""
    yield from _architecture(target, model, decision)
    yield from _degrees(target, model, decision)
    yield from _split_ranks(target, decision)
    yield from _schedule(target, decision)
    yield from _stages(target, model, decision)
    yield from _experts(target, model, decision)


def _architecture(target: Capabilities, model: ModelSpec, decision: TrainDecision) -> Iterator[str]:
    model_features = features(model)
    reasons = dict(target.unsupported_reasons)
    for feature in sorted(model_features & target.unsupported):
        reason = f": {reasons[feature]}" if feature in reasons else ""
        yield f"no arguments are written for {feature} ({model.architecture}){reason}"
    if target.one_bias_switch_is_needed:
        yield from _biases(model, model_features, decision)
    if decision.mtp_num_layers and not target.mtp:
        yield "has no multi-token prediction; mtp_num_layers must be 0"


def _biases(
    model: ModelSpec, model_features: frozenset[ModelFeature], decision: TrainDecision
) -> Iterator[str]:
    everywhere = {ModelFeature.QKV_BIAS, ModelFeature.OUTPUT_BIAS}
    if LayerKind.DENSE in model.layers:
        everywhere.add(ModelFeature.FFN_BIAS)
    if model.num_moe_layers:
        everywhere |= {ModelFeature.EXPERT_BIAS, ModelFeature.ROUTER_BIAS}
    present = model_features & (everywhere | {ModelFeature.FFN_BIAS})
    if present not in (frozenset(), {ModelFeature.QKV_BIAS}, everywhere):
        yield (
            f"biases are everywhere or nowhere except for queries, keys and values; "
            f"{model.architecture} has {listed(present)}"
        )
    if ModelFeature.EXPERT_BIAS in present and decision.expert_tensor_parallel_size > 1:
        yield "experts with biases are not split; expert_tensor_parallel_size must be 1"


def _kinds_of_parallelism(target: Capabilities) -> tuple[tuple[str, str, bool], ...]:
    return (
        ("context_parallel_size", "context", target.context_parallel),
        ("pipeline_model_parallel_size", "pipeline", target.pipeline),
        ("tensor_model_parallel_size", "tensor", target.tensor_parallel),
        ("expert_model_parallel_size", "expert", target.expert_parallel),
    )


def _degrees(target: Capabilities, model: ModelSpec, decision: TrainDecision) -> Iterator[str]:
    tensor = decision.tensor_model_parallel_size
    for degree, words, able in _kinds_of_parallelism(target):
        if getattr(decision, degree) > 1 and not able:
            yield f"has no {words} parallelism; {degree} must be 1"
    if model.attention.num_kv_heads % tensor and not target.tensor_beyond_kv_heads:
        yield (
            f"tensor_model_parallel_size {tensor} must divide the "
            f"{model.attention.num_kv_heads} key-value heads"
        )
    yield from _linear_heads(model, tensor=tensor, context=decision.context_parallel_size)
    if tensor == 1:
        return
    if decision.pipeline_model_parallel_size > 1 and not target.tensor_with_pipeline:
        yield "tensor_model_parallel_size above 1 needs pipeline_model_parallel_size 1"
    if decision.sequence_parallel and not target.sequence_parallel:
        yield "tensor ranks cannot share the sequence; sequence_parallel must be false"
    if not decision.sequence_parallel:
        if not target.sequence_parallel_optional:
            yield "always splits the sequence over the tensor ranks; sequence_parallel must be true"
        elif model.num_moe_layers and target.moe_needs_sequence_parallel:
            yield "MoE layers under tensor parallelism need sequence_parallel"


def _split_ranks(target: Capabilities, decision: TrainDecision) -> Iterator[str]:
    """Degrees that split the rank of adapters."""
    for degree, rank in (
        ("tensor_model_parallel_size", target.rank_over_tensor),
        ("expert_tensor_parallel_size", target.rank_over_expert_tensor),
    ):
        if rank % getattr(decision, degree):
            yield f"{degree} {getattr(decision, degree)} must divide rank {rank}"


def _linear_heads(model: ModelSpec, *, tensor: int, context: int) -> Iterator[str]:
    linear = model.linear
    if linear is not None and not splits_heads(linear, tensor=tensor, context=context):
        shared = "groups" if linear.kind is LinearName.MAMBA2 else "key heads"
        yield (
            f"tensor_model_parallel_size {tensor} * context_parallel_size {context} must divide the"
            f" {linear.num_value_heads} heads of linear attention and share its "
            f"{linear.num_key_heads} {shared}"
        )


def _schedule(target: Capabilities, decision: TrainDecision) -> Iterator[str]:
    virtual = decision.virtual_pipeline_model_parallel_size > 1
    schedule = decision.schedule
    if virtual and not target.virtual_pipeline:
        yield "has no interleaved pipeline; virtual_pipeline_model_parallel_size must be 1"
    if schedule is not None and schedule not in target.schedules:
        yield f"schedule {schedule} is not one of {listed(target.schedules)}"
    elif schedule == "1f1b" and virtual:
        yield "schedule 1f1b needs virtual_pipeline_model_parallel_size 1"
    elif not virtual and (
        schedule == "interleaved"
        or (schedule == "zero_bubble" and target.zero_bubble_needs_virtual_pipeline)
    ):
        yield f"schedule {schedule} needs virtual_pipeline_model_parallel_size above 1"


def _stages(target: Capabilities, model: ModelSpec, decision: TrainDecision) -> Iterator[str]:
    if decision.rank_order not in target.rank_orders:
        yield f"rank_order {decision.rank_order!r} is not one of {listed(target.rank_orders)}"
    layout = decision.pipeline_layout
    if len(set(layout)) > 1 and not target.uneven_layout:
        yield f"every stage must hold the same number of layers, not {listed(set(layout))}"
    if 0 in layout and not target.empty_stages:
        yield "every stage must hold a layer"
    if (
        model.tie_word_embeddings
        and decision.pipeline_model_parallel_size > 1
        and not target.tied_embeddings_with_pipeline
    ):
        yield "tied embeddings need pipeline_model_parallel_size 1"


def _experts(target: Capabilities, model: ModelSpec, decision: TrainDecision) -> Iterator[str]:
    experts = decision.expert_model_parallel_size
    if decision.expert_tensor_parallel_size > 1 and not target.expert_tensor_parallel:
        yield "does not split one expert; expert_tensor_parallel_size must be 1"
    if experts > decision.data_parallel_size and not target.expert_folding:
        yield "expert_model_parallel_size must not exceed data_parallel_size"
    inside = decision.context_parallel_size * decision.tensor_model_parallel_size
    if decision.zero_stage == 0 and inside % experts and target.expert_folding_needs_sharding:
        yield (
            f"expert_model_parallel_size must divide the {inside} context and tensor ranks "
            "at zero_stage 0; zero_stage 2 or 3 uses replicas for experts, too"
        )
    if not model.num_moe_layers:
        return
    if decision.tensor_model_parallel_size > 1 and experts == 1 and target.moe_tensor_needs_experts:
        yield "tensor parallelism with experts needs expert_model_parallel_size above 1"
    if (
        decision.optimizer_offload
        and decision.tensor_model_parallel_size > 1
        and target.moe_offload_needs_one_tensor_rank
    ):
        yield "optimizer_offload with experts needs tensor_model_parallel_size 1"
    if decision.dispatcher not in target.dispatchers:
        yield f"dispatcher {decision.dispatcher} is not one of {listed(target.dispatchers)}"
    elif (
        decision.pipeline_model_parallel_size > 1
        and decision.dispatcher not in target.dispatchers_with_pipeline
    ):
        yield (
            f"dispatcher {decision.dispatcher} needs pipeline_model_parallel_size 1; with a "
            f"pipeline one of {listed(target.dispatchers_with_pipeline)}"
        )
    elif (
        decision.dispatcher in ("deepep", "hybridep", "hierarchical")
        and experts * decision.expert_tensor_parallel_size == 1
    ):
        yield f"dispatcher {decision.dispatcher} needs expert_model_parallel_size above 1"
