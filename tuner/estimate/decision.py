"""A configuration as the `TrainDecision` of a plan, for comparisons and manifest checks.

A share of recomputed layers becomes a whole number of layers of every stage, as a plan counts them.
"""

from typing import Literal

from profilers.steps.config import Recompute
from tuner.config.train import TrainDecision
from tuner.estimate.configuration import Configuration
from tuner.spec.model import ModelSpec


def to_decision(config: Configuration, model: ModelSpec) -> TrainDecision:
    """Return the configuration as a plan stores it."""
    stages = len(config.stages)
    return TrainDecision(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline,
        context_parallel_size=config.context,
        data_parallel_size=config.data,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=config.expert_tensor,
        expert_data_parallel_size=config.expert_data,
        sequence_parallel=config.sequence_parallel,
        micro_batch_size=config.micro_batch,
        zero_stage=_stage(config.zero_stage),
        shard_ranks=config.ranks_per_copy or None,
        # Without experts nothing is dispatched, whatever the engine's default.
        dispatcher=config.dispatcher.value if model.num_moe_layers else "alltoall",
        a2a_overlap=config.a2a_overlap,
        recompute=config.recompute,
        recompute_modules=config.recompute_modules,
        recompute_num_layers=_layers(config, model),
        stage_recompute=(config.recompute,) * stages,
        chunks=(config.chunks,) * stages,
        pipeline_layout=tuple(stage.layers for stage in config.stages),
        mtp_num_layers=config.mtp_layers,
        fp8_recipe=config.priced_precision
        if config.priced_precision not in ("bf16", "fp32")
        else "",
        schedule=_schedule(config),
        rank_order=config.rank_order,
        cuda_graph=config.cuda_graph.value,
        overlap_grad_reduce=config.overlap_grad_reduce,
        ddp_bucket_size=config.ddp_bucket_size,
        overlap_param_gather=config.overlap_param_gather,
        gradient_bytes=2 if config.gradient_bytes == 2 else 4,
        optimizer_offload=config.optimizer_offload_ratio > 0.0,
        activation_offload=config.activation_offload_ratio > 0.0,
        ends_as_layers=any(config.embedding_loss_layers),
    )


def _stage(stage: int) -> Literal[0, 1, 2, 3]:
    stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    return stages[stage]


def _layers(config: Configuration, model: ModelSpec) -> int | None:
    if config.recompute is not Recompute.FULL or config.recompute_ratio >= 1.0:
        return None
    return max(1, round(config.recompute_ratio * model.num_layers / len(config.stages)))


def _schedule(config: Configuration) -> Literal["1f1b", "interleaved", "zero_bubble"]:
    if config.zero_bubble:
        return "zero_bubble"
    return "interleaved" if config.virtual_pipeline > 1 else "1f1b"
