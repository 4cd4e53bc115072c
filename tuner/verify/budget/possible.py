"""The trials that could be begun: every candidate, whole and smaller, with what is predicted of it.

A smaller job is left out where the model cannot price it, and where a device would not hold it:
fewer replicas share the optimizer's state among them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tuner.errors import OutsideProfileError
from tuner.plan import Plan, TrainDecision, TrainPrediction
from tuner.verify.budget.jobs import Job, job_of
from tuner.verify.budget.obstacles import Obstacle
from tuner.verify.budget.scale import Scale, scaled_plan, scales_of, why_none
from tuner.verify.neighbourhood import Around

Price = Callable[[Plan, TrainDecision], TrainPrediction]
"""What the plan's model expects of a decision, of the plan or of one made smaller."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """A job that can be launched."""

    job: Job
    predicted: TrainPrediction
    plan: Plan
    """Of the job itself, made smaller with it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Possible:
    """Options by candidate, priced when asked for."""

    around: Around
    price: Price | None = None
    """None: jobs cannot be priced at another scale, so that only whole ones are launched."""
    max_devices: int | None = None
    """None: as many as a candidate asks for."""
    _known: dict[TrainDecision, tuple[Option, ...]] = field(default_factory=dict, repr=False)
    _refused: dict[TrainDecision, Obstacle] = field(default_factory=dict, repr=False)

    @property
    def most_devices(self) -> int:
        """Devices that launches may use at a time."""
        stated = self.max_devices
        return self.around.plan.cluster.num_devices if stated is None else stated

    @property
    def band_ratio(self) -> float:
        """Half the width of the plan's band over its step."""
        predicted = self.around.plan.predicted
        if predicted is None:
            return 1.0
        low_s, high_s = predicted.step_time_s_band
        return (high_s - low_s) / (2.0 * predicted.step_time_s)

    def candidates(self) -> tuple[TrainDecision, ...]:
        """Return the decisions that may be chosen in the end, the plan's own first."""
        points = (self.around.decision_at(point) for point in self.around.seeds())
        known = dict.fromkeys(one for one in points if one is not None)
        return tuple(one for one in known if self.around.excess_bytes(one) <= 0)

    def options_of(self, candidate: TrainDecision) -> tuple[Option, ...]:
        """Return what could be launched for a candidate, smaller jobs first."""
        known = self._known.get(candidate)
        if known is None:
            most, plan = self.most_devices, self.around.plan
            scales = scales_of(plan, candidate, max_devices=most) if self.price else ()
            scaled = (self._scaled(candidate, scale) for scale in scales)
            found = [one for one in scaled if one is not None]
            if candidate.num_devices <= most:
                found.append(self.whole(candidate))
            known = self._known[candidate] = tuple(found)
        return known

    def whole(self, candidate: TrainDecision) -> Option:
        """Return the whole job of a candidate, however many devices it asks for."""
        plan, predicted = self.around.plan, self.around.predicted(candidate)
        job = job_of(plan, candidate, None, predicted, whole_s=predicted.step_time_s)
        return Option(job=job, predicted=predicted, plan=plan)

    def option(self, candidate: TrainDecision, scale: Scale | None) -> Option | None:
        """Return the option of a trial; None where the model does not price it."""
        if scale is None:
            return self.whole(candidate)
        known = (one for one in self.options_of(candidate) if one.job.scale == scale)
        return next(known, None) or self._scaled(candidate, scale)

    def why_none(self, candidate: TrainDecision) -> Obstacle:
        """Say why nothing can be launched for a candidate."""
        if self.price is None:
            return Obstacle(rule="this plan's model cannot price a smaller job")
        refused = self._refused.get(candidate)
        return refused or why_none(self.around.plan, candidate, max_devices=self.most_devices)

    def fewest_devices(self) -> int | None:
        """Return the smallest number of devices on which some candidate has a trial.

        None where no number smaller than a whole job is enough.
        """
        obstacles = [self.why_none(one) for one in self.candidates()]
        counts = {one.least.num_devices for one in obstacles if one.least is not None}
        for count in sorted(counts):
            roomier = Possible(around=self.around, price=self.price, max_devices=count)
            if any(roomier.options_of(one) for one in self.candidates()):
                return count
        return None

    def _scaled(self, candidate: TrainDecision, scale: Scale) -> Option | None:
        assert self.price is not None
        plan = scaled_plan(self.around.plan, scale)
        try:
            predicted = self.price(plan, scale.decision)
        except OutsideProfileError as error:
            rule = "the model cannot price its smaller jobs"
            self._refused[candidate] = Obstacle(rule=rule, detail=str(error))
            return None
        limit = predicted.memory_limit_bytes
        if limit is not None and max(predicted.peak_memory_bytes) > limit:
            rule = "its smaller jobs hold more state per device than fits"
            self._refused[candidate] = Obstacle(rule=rule)
            return None
        whole_s = self.around.predicted(candidate).step_time_s
        job = job_of(self.around.plan, candidate, scale, predicted, whole_s=whole_s)
        return Option(job=job, predicted=predicted, plan=plan)
