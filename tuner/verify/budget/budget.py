"""Says which trials still fit a budget of time and devices; the sampler chooses among them.

A trial is started only if it is predicted to end in time: after the longest start-up of any trial,
or `START_UP_S` before the first, and at the upper end of its step. That is its band's before the
first trial, and then what the slowest trial took of its prediction, with `SLOWER_RATIO` more. A
trial that still runs at the end of the budget is ended after a grace period of a twentieth of the
budget, a minute at most.

The budget is wall time of one call; the devices are those of all parallel launches.

Not covered: queueing time of a job counts as start-up, once it was seen.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tuner.config.train import TrainDecision
from tuner.errors import SpecError
from tuner.units import format_s
from tuner.verify.budget.scale import Scale
from tuner.verify.launches import WARMUP_STEPS, TrialJob, TrialJobs
from tuner.verify.measured_steps import measured_ratio, measured_s
from tuner.verify.records import Proposal, TrialRecord

START_UP_S: Final = {True: 20.0, False: 180.0}
"""Our estimates, by whether the reference step runs: processes that import PyTorch and rendezvous;
an engine that also builds data sets and compiles."""

SLOWER_RATIO: Final = 0.1
"""Share by which the next trial may exceed the largest measured-to-predicted ratio so far; our
estimate."""

GRACE_RATIO: Final = 0.05
MOST_GRACE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The resources of all trials."""

    wall_s: float = math.inf
    max_devices: int | None = None
    """Devices in use at once, at most; None: as many as the candidates need."""

    @property
    def grace_s(self) -> float:
        """Grace period after the end of the budget, for a running trial."""
        return min(GRACE_RATIO * self.wall_s, MOST_GRACE_S)


@dataclass(kw_only=True, eq=False)
class Spending:
    """Spends a budget; a resource with a clock."""

    jobs: TrialJobs
    budget: Budget
    clock: Callable[[], float]
    num_steps: int
    """Optimizer steps of one launch, warm-up included."""
    runs_reference: bool = True
    _begun_s: float = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock."""
        self._begun_s = self.clock()

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self.budget.wall_s - (self.clock() - self._begun_s)

    def latest_s(self) -> float:
        """Seconds from now after which a trial is ended in any case."""
        return max(0.0, self.left_s + self.budget.grace_s)

    def affordable(
        self, records: Sequence[TrialRecord], *, running: Sequence[Proposal] = ()
    ) -> dict[TrainDecision, Scale | None]:
        """Return the decisions that may be launched now, each with its scaled-down job or None.

        Args:
            records: of all trials so far.
            running: trials that have begun and not ended.
        """
        free = math.inf
        if self.budget.max_devices is not None:
            busy = sum((proposal.scale or proposal.decision).num_devices for proposal in running)
            free = self.budget.max_devices - busy
        return {
            job.decision: job.scale
            for job in self._possible()
            if job.num_devices <= free and self._cost_s(job, records) <= self.left_s
        }

    def check(self) -> None:
        """Refuse a budget that is too small for any trial.

        Raises:
            SpecError: it names the cheapest trial, or why there is none.
        """
        cheapest = min(self._possible(), key=lambda job: self._cost_s(job, ()), default=None)
        if cheapest is None:
            fewest = self.jobs.fewest_devices()
            raise SpecError(
                "no candidate of the plan fits in memory: nothing can be launched; plan anew"
                if fewest is None
                else f"--max-devices {self.jobs.most_devices}: no trial is small enough; give"
                f" --max-devices {fewest} or more"
            )
        cost_s = self._cost_s(cheapest, ())
        if cost_s > self.budget.wall_s:
            raise SpecError(
                f"--budget {format_s(self.budget.wall_s)}: the shortest trial is predicted to take"
                f" up to {format_s(cost_s)} ({cheapest.num_devices} devices,"
                f" {self.num_steps} steps); give more, or fewer --steps"
            )

    def without_own_choice(self) -> tuple[str, ...]:
        """Say in one line why the plan's own choice has no trial; nothing if it has one."""
        choice = self.jobs.space.plan.decision
        if choice is None or self.jobs.job(choice) is not None:
            return ()
        return (
            f"the plan's own choice has no trial: it needs {choice.num_devices} devices, and no"
            f" smaller job of it fits {self.jobs.most_devices}",
        )

    def stop_notes(self, records: Sequence[TrialRecord], *, trials: int) -> tuple[str, ...]:
        """Say why fewer trials than requested were launched, if the budget was the reason."""
        tried = {record.decision for record in records}
        left = [job for job in self._possible() if job.decision not in tried]
        costs_s = [self._cost_s(job, records) for job in left]
        if not left or len(tried) >= trials or min(costs_s) <= self.left_s:
            return self.without_own_choice()
        return (
            *self.without_own_choice(),
            f"stopped: {format_s(max(0.0, self.left_s))} of the budget are left and the cheapest"
            f" of {len(left)} further trials takes up to {format_s(min(costs_s))}",
        )

    def _possible(self) -> list[TrialJob]:
        jobs = map(self.jobs.job, self.jobs.space.points())
        return [job for job in jobs if job is not None]

    def _cost_s(self, job: TrialJob, records: Sequence[TrialRecord]) -> float:
        """Predict the wall time of a launch: start-up, and its steps with the warm-up."""
        ran = [record for record in records if record.status == "ok"]
        spent = [
            # Warm-up and timed steps: what the trial surely ran, whatever this call's --steps.
            record.wall_s - (WARMUP_STEPS + len(record.measured_steps_s)) * measured_s(record)
            for record in ran
        ]
        step_s = job.predicted.step_time_s_band[1]
        if ran:
            slowest = (1.0 + SLOWER_RATIO) * max(map(measured_ratio, ran))
            step_s = slowest * job.predicted.step_time_s
        start_up_s = max(spent, default=START_UP_S[self.runs_reference])
        return max(0.0, start_up_s) + self.num_steps * step_s
