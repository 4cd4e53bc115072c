"""The possible trials: every candidate at full and smaller scales, with its prediction.

A scaled-down job is left out if the model cannot price it or if it does not fit in memory: fewer
replicas shard the optimizer state.

A predicted step is split into parts that jobs of different scale share:

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tuner.arrays import Floats
from tuner.config.train import TrainDecision
from tuner.engines.launchers.shape import launch_shape
from tuner.errors import OutsideProfileError
from tuner.plans.train import Plan, TrainPrediction
from tuner.verify.budget.scale import Obstacle, Scale, launchable_scales, scaled_plan, why_none
from tuner.verify.neighbourhood import TrainSpace

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


Price = Callable[[Plan, TrainDecision], TrainPrediction]
"""Predicts a decision of the plan or of a scaled-down plan."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialOption:
    """A job that can be launched."""

    job: TrialJob
    predicted: TrainPrediction
    plan: Plan
    """The job's plan, scaled down with it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrialOptions:
    """Options by candidate, priced on demand."""

    space: TrainSpace
    price: Price | None = None
    """None: only full-scale jobs can be priced and launched."""
    max_devices: int | None = None
    """None: as many as a candidate needs."""
    _known: dict[TrainDecision, tuple[TrialOption, ...]] = field(default_factory=dict, repr=False)
    _refused: dict[TrainDecision, Obstacle] = field(default_factory=dict, repr=False)

    @property
    def most_devices(self) -> int:
        """Devices that launches may use at once."""
        stated = self.max_devices
        return self.space.plan.cluster.num_devices if stated is None else stated

    @property
    def band_ratio(self) -> float:
        """Half the width of the plan's band over its step."""
        predicted = self.space.plan.predicted
        if predicted is None:
            return 1.0
        low_s, high_s = predicted.step_time_s_band
        return (high_s - low_s) / (2.0 * predicted.step_time_s)

    def candidates(self) -> tuple[TrainDecision, ...]:
        """Return the decisions that may win, the plan's own first."""
        points = self.space.points()
        return tuple(one for one in self.space.candidates if one in points)

    def options_of(self, candidate: TrainDecision) -> tuple[TrialOption, ...]:
        """Return the possible jobs of a candidate, scaled-down ones first."""
        known = self._known.get(candidate)
        if known is None:
            most, plan = self.most_devices, self.space.plan
            scales = launchable_scales(plan, candidate, max_devices=most) if self.price else ()
            scaled = (self._scaled(candidate, scale) for scale in scales)
            options = [one for one in scaled if one is not None]
            if candidate.num_devices <= most:
                options.append(self.whole(candidate))
            known = self._known[candidate] = tuple(options)
        return known

    def whole(self, candidate: TrainDecision) -> TrialOption:
        """Return the full-scale job of a candidate, whatever number of devices it needs."""
        plan, predicted = self.space.plan, self.space.predicted(candidate)
        job = build_job(plan, candidate, None, predicted, whole_s=predicted.step_time_s)
        return TrialOption(job=job, predicted=predicted, plan=plan)

    def option(self, candidate: TrainDecision, scale: Scale | None) -> TrialOption | None:
        """Return the option of a trial; None if the model cannot price it."""
        if scale is None:
            return self.whole(candidate)
        known = (one for one in self.options_of(candidate) if one.job.scale == scale)
        return next(known, None) or self._scaled(candidate, scale)

    def why_none(self, candidate: TrainDecision) -> Obstacle:
        """Say why nothing can be launched for a candidate."""
        if self.price is None:
            return Obstacle(rule="this plan's model cannot price a smaller job")
        refused = self._refused.get(candidate)
        return refused or why_none(self.space.plan, candidate, max_devices=self.most_devices)

    def fewest_devices(self) -> int | None:
        """Return the smallest number of devices on which some candidate has a trial, if any."""
        roomy = TrialOptions(space=self.space, price=self.price)
        jobs = [option.job for one in self.candidates() for option in roomy.options_of(one)]
        return min((job.num_devices for job in jobs), default=None)

    def _scaled(self, candidate: TrainDecision, scale: Scale) -> TrialOption | None:
        assert self.price is not None
        plan = scaled_plan(self.space.plan, scale)
        try:
            predicted = self.price(plan, scale.decision)
        except OutsideProfileError as error:
            rule = "the model cannot price its smaller jobs"
            self._refused[candidate] = Obstacle(rule=rule, detail=str(error))
            return None
        limit = predicted.memory_limit_bytes
        if limit is not None and max(predicted.peak_memory_bytes) > limit:
            rule = "its smaller jobs have more state per device than fits"
            self._refused[candidate] = Obstacle(rule=rule)
            return None
        whole_s = self.space.predicted(candidate).step_time_s
        job = build_job(self.space.plan, candidate, scale, predicted, whole_s=whole_s)
        return TrialOption(job=job, predicted=predicted, plan=plan)
