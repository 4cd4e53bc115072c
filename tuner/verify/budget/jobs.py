"""A predicted step by what its seconds have in common with those of other jobs.

    layers      computation inside layers, recomputation and the host's launches too
    exchange    collectives inside layers and between stages: tensor, context, expert, pipeline
    ends        embedding, head, loss: as long with few layers as with many
    state       gradient sums and parameter gathers over replicas, and what comes once with them
    update      the optimizer, where the model tells it apart

A bubble is waiting for others' layers, and is counted as what they spend. Causes are those of
`TrainPrediction.breakdown_s`, of the reference step's model (tuner/costs/operations.py) and of the
analytic one (tuner/planner/analytic/plan_fields.py), whose `once` holds sums, gathers and
optimizer.

Letters: K parts, in the order above.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.launch.shape import launch_shape
from tuner.plan import Plan, TrainDecision, TrainPrediction
from tuner.verify.budget.scale import Scale, scaled_plan

Floats = npt.NDArray[np.float64]

PARTS: Final = ("layers", "exchange", "ends", "state", "update")
LAYERS, EXCHANGE, ENDS, STATE, UPDATE = range(len(PARTS))

PART_OF_CAUSE: Final[Mapping[str, int]] = {
    "tensor_communication": EXCHANGE,
    "expert_communication": EXCHANGE,
    "pipeline_communication": EXCHANGE,
    "tensor": EXCHANGE,
    "context": EXCHANGE,
    "expert": EXCHANGE,
    "embedding": ENDS,
    "head": ENDS,
    "ends": ENDS,
    "data_communication": STATE,
    "once": STATE,
    "optimizer": UPDATE,
}
"""Causes that are not named are computation inside layers."""

BUBBLE: Final = "bubble"

Sync = tuple[int, int, bool]
"""Replicas of dense layers, replicas of experts, and whether a stage lies on several nodes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """A whole job or a smaller one, with what is predicted of its step."""

    candidate: TrainDecision
    """The whole job's."""
    scale: Scale | None
    """None: it is the whole job."""
    parts_s_K: Floats
    """Predicted seconds; they add up to the step."""
    sync: Sync
    """Whose gradient sums it shares."""
    whole_s: float
    """Predicted seconds of a step of the whole job."""

    @property
    def halvings(self) -> float:
        """How many times shorter than the whole job's a step is predicted, as a power of two."""
        return max(0.0, math.log2(self.whole_s / self.predicted_s))

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of a step."""
        return float(self.parts_s_K.sum())

    @property
    def num_devices(self) -> int:
        """Devices that it asks for."""
        return (self.scale or self).decision.num_devices

    @property
    def decision(self) -> TrainDecision:
        """What is launched."""
        return self.candidate if self.scale is None else self.scale.decision


def job_of(
    plan: Plan,
    candidate: TrainDecision,
    scale: Scale | None,
    predicted: TrainPrediction,
    *,
    whole_s: float,
) -> Job:
    """Return the job of a candidate at a scale; `whole_s` is the whole job's predicted step."""
    launched = candidate if scale is None else scale.decision
    shape = launch_shape(plan if scale is None else scaled_plan(plan, scale), launched)
    stage = launched.num_devices // launched.pipeline_model_parallel_size
    return Job(
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
    """Split a predicted step."""
    found = np.zeros(len(PARTS))
    for cause, seconds in predicted.breakdown_s.items():
        if cause != BUBBLE:
            found[PART_OF_CAUSE.get(cause, LAYERS)] += seconds
    waited = (LAYERS, EXCHANGE)
    inside = found[list(waited)].sum()
    bubble = predicted.breakdown_s.get(BUBBLE, 0.0)
    for part in waited:
        found[part] += bubble * (found[part] / inside if inside else part == LAYERS)
    scaled: Floats = found * (predicted.step_time_s / max(found.sum(), 1e-12))
    return scaled
