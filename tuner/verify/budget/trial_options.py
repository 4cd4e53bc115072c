"""The possible trials: every candidate at full and smaller scales, with its prediction.

A scaled-down job is left out if the model cannot price it or if it does not fit in memory: fewer
replicas shard the optimizer state.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tuner.config.train import TrainDecision
from tuner.errors import OutsideProfileError
from tuner.plans.train import Plan, TrainPrediction
from tuner.verify.budget.jobs import TrialJob, build_job
from tuner.verify.budget.obstacles import Obstacle
from tuner.verify.budget.scale import Scale, launchable_scales, scaled_plan, why_none
from tuner.verify.neighbourhood import TrainSpace

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
        points = (self.space.decision_at(point) for point in self.space.seeds())
        known = dict.fromkeys(one for one in points if one is not None)
        return tuple(one for one in known if self.space.excess_bytes(one) <= 0)

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
        """Return the smallest number of devices on which some candidate has a trial.

        None if no number below full scale is enough.
        """
        obstacles = [self.why_none(one) for one in self.candidates()]
        counts = {one.least.num_devices for one in obstacles if one.least is not None}
        for count in sorted(counts):
            roomier = TrialOptions(space=self.space, price=self.price, max_devices=count)
            if any(roomier.options_of(one) for one in self.candidates()):
                return count
        return None

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
