"""Turns a proposal into a launch and its result into a record, also for scaled-down jobs.

A trial is ended at ten times its predicted time, or when its budget is over.

A job is the whole one of its decision, or a smaller one where it must be: a decision that needs
more devices than there are is launched as its largest smaller job that they hold, that the model
can price, and that fits in memory: fewer replicas shard the optimizer state.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from profilers.steps.config import StepReport
from tuner.config.train import TrainDecision
from tuner.engines.targets import programs
from tuner.errors import OutsideProfileError, StudyError
from tuner.plans.train import Plan, TrainPrediction
from tuner.verify.budget.scale import Scale, launchable_scales, scaled_plan
from tuner.verify.launcher import Launch, LaunchResult, TrialLauncher, never_hopeless
from tuner.verify.measured_steps import slower_than
from tuner.verify.records import Proposal, TrialRecord
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
        fewest = min((decision.num_devices for decision in self.space.points()), default=None)
        for decision in self.space.points():
            while fewest is not None and (
                job := next(self._smaller(decision, most_devices=fewest - 1), None)
            ):
                fewest = job.num_devices
        return fewest

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


REFERENCE: Final = "reference"
"""The engine that the operation-level cost model describes."""

WARMUP_STEPS: Final = 2
METERED_STEPS: Final = 2
"""One more step meters memory, which slows it down: it counts as two."""

START_UP_S: Final = 90.0
"""Generous time for start-up and rendezvous, before a trial counts as hung."""

SLOWER_THAN_PREDICTED: Final = 10.0
"""Ratio to the predicted step beyond which a trial counts as hung."""


def total_steps(timed_steps: int) -> int:
    """Return the steps of a launch: warm-up, timed and metered."""
    return WARMUP_STEPS + timed_steps + METERED_STEPS


def start_training(
    proposal: Proposal,
    records: Sequence[TrialRecord],
    *,
    jobs: TrialJobs,
    steps: int,
    launch: TrialLauncher,
    scratch: Path,
    started: Callable[[TrainDecision, float], None],
    latest_s: Callable[[], float] = lambda: math.inf,
) -> Callable[[], TrialRecord]:
    """Prepare a trial, full-scale or scaled down; return what runs it to its record.

    Args:
        proposal: to launch.
        records: of the trials so far.
        jobs: the full-scale and scaled-down jobs that may be launched.
        steps: timed steps.
        launch: runs the job.
        scratch: folder of the folders of trials.
        started: called with every decision and its predicted step time in seconds.
        latest_s: returns the seconds from now after which it is ended in any case.
    """
    job = jobs.of_scale(proposal.decision, proposal.scale)
    if job is None:
        raise StudyError(
            f"trial {proposal.number} is of a scaled-down job that this plan cannot price; use"
            " one release of moetune everywhere"
        )
    whole = [record for record in records if record.scale is None]
    request = build_launch(
        job,
        timed_steps=steps,
        folder=scratch / f"{proposal.number:04d}",
        latest_s=latest_s(),
        hopeless=never_hopeless if proposal.scale else slower_than(whole),
    )
    started(request.decision, request.predicted.step_time_s)
    return lambda: to_record(job, proposal, run_launch(launch, request))


def build_launch(
    job: TrialJob,
    *,
    timed_steps: int,
    folder: Path,
    latest_s: float,
    hopeless: Callable[[Sequence[float]], str],
) -> Launch:
    """Return the launch of a job.

    Args:
        job: to launch.
        timed_steps: warm-up excluded.
        folder: of the trial.
        latest_s: seconds after which it is ended in any case.
        hopeless: see `Launch`.
    """
    predicted = job.predicted
    patience_s = (
        START_UP_S + SLOWER_THAN_PREDICTED * total_steps(timed_steps) * predicted.step_time_s
    )
    return Launch(
        plan=job.plan,
        decision=job.launched,
        predicted=predicted,
        steps=timed_steps,
        warmup_steps=WARMUP_STEPS,
        folder=folder,
        deadline_s=min(patience_s, latest_s),
        latest_s=latest_s,
        hopeless=hopeless,
    )


def run_launch(launch: TrialLauncher, request: Launch) -> LaunchResult:
    """Run a trial; name the budget as the reason if that ended it."""
    result = launch(request)
    # The folder is removed; its logs are kept under their relative names (kept_logs.py).
    result = replace(result, reason=result.reason.replace(f"{request.folder.resolve()}/", ""))
    if result.status != "timeout" or result.wall_s < request.latest_s:
        return result
    return replace(result, reason="the budget was over while the job ran; it was ended")


def to_record(job: TrialJob, proposal: Proposal, result: LaunchResult) -> TrialRecord:
    """Return the record of a launch."""
    predicted, report, metrics = job.predicted, result.report, result.metrics
    if report is not None:
        steps_s, activation_bytes = report.step_s, _activations(job.launched, report)
    elif metrics is not None:
        steps_s, activation_bytes = metrics.steps_s, metrics.activation_bytes
    else:
        steps_s, activation_bytes = (), ()
    return TrialRecord(
        number=proposal.number,
        origin=proposal.origin,
        decision=proposal.decision,
        scale=proposal.scale,
        status=result.status,
        reason=result.reason,
        predicted_step_s=predicted.step_time_s,
        predicted_communication_s=predicted.communication_s,
        predicted_activation_bytes=predicted.activation_bytes,
        measured_steps_s=steps_s,
        measured_step_s=statistics.median(steps_s) if steps_s else None,
        measured_activation_bytes=activation_bytes,
        measured_peak_bytes=metrics.peak_bytes if metrics else None,
        measured_loads=report.loads[-1] if report and report.loads else (),
        wall_s=result.wall_s,
        # Only the reference step reports; other programs print.
        engine=engine_of(job.plan) if report is None else REFERENCE,
        release=report.libraries.get("torch", "") if report else "",
        device=report.device if report else "",
    )


def engine_of(plan: Plan) -> str:
    """Return the engine that a plan was priced for."""
    if plan.provenance.residual is not None:
        return plan.provenance.residual.engine
    return REFERENCE if plan.provenance.device_kind else programs(plan.emit).chosen[0]


def _activations(decision: TrainDecision, report: StepReport) -> tuple[int, ...]:
    """The peak over the devices of each pipeline rank."""
    per_stage = decision.num_devices // decision.pipeline_model_parallel_size
    by_rank = [
        memory.activations for memory in sorted(report.memory, key=lambda device: device.rank)
    ]
    return tuple(
        max(by_rank[first : first + per_stage]) for first in range(0, len(by_rank), per_stage)
    )
