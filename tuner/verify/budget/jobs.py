"""A predicted step, split into parts that jobs of different scale share.

    layers      computation inside layers, including recomputation and kernel launches
    collectives inside layers and between stages: tensor, context, expert, pipeline
    head        embedding, LM head, loss: the same with few layers as with many
    state       gradient reduction and parameter all-gather over replicas, once per step
    update      the optimizer, if the model lists it separately

A pipeline bubble waits for other stages, and is split like their time. Causes are those of
`TrainPrediction.breakdown_s`, of the reference step's model (tuner/costs/reference/operations.py)
and of the analytic one (tuner/search/train/plan_fields.py), whose `once` includes gradient
reduction, parameter all-gather and optimizer.

Letters: K parts, in the order above.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.arrays import Floats
from tuner.config.train import TrainDecision
from tuner.engines.launchers.shape import launch_shape
from tuner.plans.train import Plan, TrainPrediction
from tuner.verify.budget.scale import Scale, scaled_plan

PARTS: Final = ("layers", "collectives", "head", "state", "update")
LAYERS, COLLECTIVES, EMBEDDING_HEAD, STATE, UPDATE = range(len(PARTS))

PART_OF_CAUSE: Final[Mapping[str, int]] = {
    "tensor_communication": COLLECTIVES,
    "expert_communication": COLLECTIVES,
    "pipeline_communication": COLLECTIVES,
    "tensor": COLLECTIVES,
    "context": COLLECTIVES,
    "expert": COLLECTIVES,
    "embedding": EMBEDDING_HEAD,
    "head": EMBEDDING_HEAD,
    "ends": EMBEDDING_HEAD,
    "data_communication": STATE,
    "once": STATE,
    "optimizer": UPDATE,
}
"""All other causes are computation inside layers."""

BUBBLE: Final = "bubble"

Sync = tuple[int, int, bool]
"""Replicas of dense layers, replicas of experts, and whether a stage spans several nodes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialJob:
    """A full-scale or scaled-down job with its predicted step."""

    candidate: TrainDecision
    """The full-scale decision."""
    scale: Scale | None
    """None: full scale."""
    parts_s_K: Floats
    """Predicted seconds of each part; they add up to the step."""
    sync: Sync
    """Jobs with equal values share the factor of gradient reduction."""
    whole_s: float
    """Predicted step of the full-scale job, in seconds."""

    @property
    def halvings(self) -> float:
        """log2 of the full-scale predicted step over this one, at least 0."""
        return max(0.0, math.log2(self.whole_s / self.predicted_s))

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of a step."""
        return float(self.parts_s_K.sum())

    @property
    def num_devices(self) -> int:
        """Devices that it needs."""
        return (self.scale or self).decision.num_devices

    @property
    def decision(self) -> TrainDecision:
        """The launched decision."""
        return self.candidate if self.scale is None else self.scale.decision


def build_job(
    plan: Plan,
    candidate: TrainDecision,
    scale: Scale | None,
    predicted: TrainPrediction,
    *,
    whole_s: float,
) -> TrialJob:
    """Return the job of a candidate at a scale; `whole_s` is the full-scale predicted step."""
    launched = candidate if scale is None else scale.decision
    shape = launch_shape(plan if scale is None else scaled_plan(plan, scale), launched)
    stage = launched.num_devices // launched.pipeline_model_parallel_size
    return TrialJob(
        candidate=candidate,
        scale=scale,
        parts_s_K=parts_s_K(predicted),
        sync=(
            launched.data_parallel_size * launched.context_parallel_size,
            launched.expert_data_parallel_size,
            stage > shape.devices_per_node,
        ),
        whole_s=whole_s,
    )


def parts_s_K(predicted: TrainPrediction) -> Floats:
    """Split a predicted step into its parts."""
    parts_K = np.zeros(len(PARTS))
    for cause, seconds in predicted.breakdown_s.items():
        if cause != BUBBLE:
            parts_K[PART_OF_CAUSE.get(cause, LAYERS)] += seconds
    waited = (LAYERS, COLLECTIVES)
    inside = parts_K[list(waited)].sum()
    bubble = predicted.breakdown_s.get(BUBBLE, 0.0)
    for part in waited:
        parts_K[part] += bubble * (parts_K[part] / inside if inside else part == LAYERS)
    scaled: Floats = parts_K * (predicted.step_time_s / max(parts_K.sum(), 1e-12))
    return scaled
