"""A configuration as the `TrainDecision` of a plan, for comparisons and manifest checks.

A share of recomputed layers becomes a whole number of layers of every stage, as a plan counts them.
"""

from typing import Literal

from profilers.steps.config import Recompute
from tuner.config.knobs import FIELD_OF_DEGREE, KNOBS, OFFLOADS
from tuner.config.train import TrainDecision
from tuner.estimate.configuration import Configuration
from tuner.spec.model import ModelSpec


def to_decision(config: Configuration, model: ModelSpec) -> TrainDecision:
    """Return the configuration as a plan stores it."""
    stages = len(config.stages)
    same = {
        knob.field: getattr(config, knob.field)
        for knob in KNOBS
        if knob.field in Configuration.model_fields
    }
    return TrainDecision.model_validate(
        same
        | {field: getattr(config, column) for column, field in FIELD_OF_DEGREE.items()}
        | {name: getattr(config, f"{name}_ratio") > 0.0 for name in OFFLOADS}
        | {
            "expert_data_parallel_size": config.expert_data,
            "shard_ranks": config.ranks_per_copy or None,
            # Without experts nothing is dispatched, whatever the engine's default.
            "dispatcher": config.dispatcher.value if model.num_moe_layers else "alltoall",
            "recompute": config.recompute,
            "recompute_num_layers": _layers(config, model),
            "stage_recompute": (config.recompute,) * stages,
            "chunks": (config.chunks,) * stages,
            "pipeline_layout": tuple(stage.layers for stage in config.stages),
            "mtp_num_layers": config.mtp_layers,
            "fp8_recipe": config.priced_precision if config.fp8_recipe else "",
            "schedule": _schedule(config),
            "ends_as_layers": any(config.embedding_loss_layers),
        }
    )


def _layers(config: Configuration, model: ModelSpec) -> int | None:
    if config.recompute is not Recompute.FULL or config.recompute_ratio >= 1.0:
        return None
    return max(1, round(config.recompute_ratio * model.num_layers / len(config.stages)))


def _schedule(config: Configuration) -> Literal["1f1b", "interleaved", "zero_bubble"]:
    if config.zero_bubble:
        return "zero_bubble"
    return "interleaved" if config.virtual_pipeline > 1 else "1f1b"
