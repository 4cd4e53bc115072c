"""The job that a trial of a decision launches: the whole one, or a smaller one where it must.

A decision that needs more devices than there are is launched as its largest smaller job that they
hold, that the model can price, and that fits in memory: fewer replicas shard the optimizer state.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tuner.config.train import TrainDecision
from tuner.errors import OutsideProfileError
from tuner.plans.train import Plan, TrainPrediction
from tuner.verify.budget.scale import Scale, launchable_scales, scaled_plan
from tuner.verify.space import Price, TrainSpace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialJob:
    """A job that can be launched."""

    decision: TrainDecision
    """Decision of the whole job."""
    scale: Scale | None
    """The scaled-down job; None: the whole one."""
    predicted: TrainPrediction
    plan: Plan
    """The job's plan, scaled down with it."""

    @property
    def launched(self) -> TrainDecision:
        """The launched decision."""
        return self.decision if self.scale is None else self.scale.decision

    @property
    def num_devices(self) -> int:
        """Devices that it needs."""
        return self.launched.num_devices


@dataclass(frozen=True, kw_only=True, eq=False)
class TrialJobs:
    """The job of each decision, priced on demand."""

    space: TrainSpace
    price: Price | None = None
    """Pricing of scaled-down jobs; None: only whole jobs can be priced and launched."""
    max_devices: int | None = None
    """Devices of a job, at most; None: as many as a decision needs."""
    _known: dict[TrainDecision, TrialJob | None] = field(default_factory=dict, repr=False)

    @property
    def most_devices(self) -> int:
        """Devices that launches may use at once."""
        stated = self.max_devices
        return self.space.plan.cluster.num_devices if stated is None else stated

    def job(self, decision: TrainDecision) -> TrialJob | None:
        """Return what is launched for a decision; None if no job of it fits the devices."""
        if decision.num_devices <= self.most_devices:
            return self.whole(decision)
        if decision not in self._known:
            smaller = self._smaller(decision, most_devices=self.most_devices)
            self._known[decision] = next(smaller, None)
        return self._known[decision]

    def whole(self, decision: TrainDecision) -> TrialJob:
        """Return the whole job of a decision, whatever number of devices it needs."""
        predicted, plan = self.space.predicted(decision), self.space.plan
        return TrialJob(decision=decision, scale=None, predicted=predicted, plan=plan)

    def of_scale(self, decision: TrainDecision, scale: Scale | None) -> TrialJob | None:
        """Return the job of a proposal; None if the model cannot price it."""
        return self.whole(decision) if scale is None else self._scaled(decision, scale)

    def fewest_devices(self) -> int | None:
        """Return the smallest number of devices on which some decision has a job, if any."""
        jobs = (
            job
            for one in self.space.points()
            for job in (self.whole(one), *self._smaller(one, most_devices=one.num_devices))
        )
        return min((job.num_devices for job in jobs), default=None)

    def _smaller(self, decision: TrainDecision, *, most_devices: int) -> Iterator[TrialJob]:
        """Yield the smaller jobs that fit in memory, the largest first."""
        if self.price is not None:
            for scale in launchable_scales(self.space.plan, decision, max_devices=most_devices):
                job = self._scaled(decision, scale)
                limit = None if job is None else job.predicted.memory_limit_bytes
                if job and (limit is None or max(job.predicted.peak_memory_bytes) <= limit):
                    yield job

    def _scaled(self, decision: TrainDecision, scale: Scale) -> TrialJob | None:
        plan = scaled_plan(self.space.plan, scale)
        try:
            predicted = None if self.price is None else self.price(plan, scale.decision)
        except OutsideProfileError:
            return None
        if predicted is None:
            return None
        return TrialJob(decision=decision, scale=scale, predicted=predicted, plan=plan)
