"""A configuration in the words of a plan: the two can be compared, and manifests can judge it.

A share of recomputed layers becomes a whole number of layers of every stage, as a plan counts them.
"""

from typing import Literal

from profilers.steps.config import Recompute
from tuner.estimate.configuration import Configuration
from tuner.estimate.launch import Graphs
from tuner.plan import TrainDecision
from tuner.spec.model import ModelSpec


def decision_of(own: Configuration, model: ModelSpec) -> TrainDecision:
    """Return what a plan would hold of the configuration."""
    stages = len(own.stages)
    return TrainDecision(
        tensor_model_parallel_size=own.tensor,
        pipeline_model_parallel_size=own.pipeline,
        virtual_pipeline_model_parallel_size=own.virtual_pipeline,
        context_parallel_size=own.context,
        data_parallel_size=own.data,
        expert_model_parallel_size=own.expert,
        expert_tensor_parallel_size=own.expert_tensor,
        expert_data_parallel_size=own.expert_data,
        sequence_parallel=own.sequence_parallel,
        micro_batch_size=own.micro_batch,
        zero_stage=_stage(own.zero_stage),
        shard_ranks=own.shard_ranks or None,
        # Without experts nothing is dispatched, whatever the engine's default.
        dispatcher=own.dispatcher.value if model.num_moe_layers else "alltoall",
        a2a_overlap=own.a2a_overlap,
        recompute=own.recompute,
        recompute_modules=own.recompute_modules,
        recompute_num_layers=_layers(own, model),
        stage_recompute=(own.recompute,) * stages,
        chunks=(own.chunks,) * stages,
        pipeline_layout=tuple(stage.layers for stage in own.stages),
        mtp_num_layers=own.mtp_layers,
        fp8_recipe=own.precision if own.precision not in ("bf16", "fp32") else "",
        schedule=_schedule(own),
        rank_order=own.rank_order,
        cuda_graph="full_iteration" if own.graphs is Graphs.FULL else own.graphs.value,
        overlap_grad_reduce=own.overlap_gradients,
        ddp_bucket_size=own.ddp_bucket_size,
        overlap_param_gather=own.overlap_parameters,
        gradient_bytes=2 if own.gradient_bytes == 2 else 4,
        optimizer_offload=own.optimizer_offload_ratio > 0.0,
        activation_offload=own.activation_offload_ratio > 0.0,
        ends_as_layers=any(own.ends),
    )


def _stage(stage: int) -> Literal[0, 1, 2, 3]:
    stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    return stages[stage]


def _layers(own: Configuration, model: ModelSpec) -> int | None:
    if own.recompute is not Recompute.FULL or own.recompute_ratio >= 1.0:
        return None
    return max(1, round(own.recompute_ratio * model.num_layers / len(own.stages)))


def _schedule(own: Configuration) -> Literal["1f1b", "interleaved", "zero_bubble"]:
    if own.zero_bubble:
        return "zero_bubble"
    return "interleaved" if own.virtual_pipeline > 1 else "1f1b"
