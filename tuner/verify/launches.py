"""Turns a proposal into a launch and its result into a record, also for scaled-down jobs.

A trial is ended at ten times its predicted time, or when its budget is over.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from profilers.steps.config import StepReport
from tuner.config.train import TrainDecision
from tuner.engines.capabilities import programs
from tuner.plans.train import Plan
from tuner.verify.budget.trial_jobs import TrialJob
from tuner.verify.launcher import Launch, LaunchResult, TrialLauncher
from tuner.verify.proposal import Proposal
from tuner.verify.records import TrialRecord

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
    return REFERENCE if plan.provenance.device_kind else programs(plan.emit)[0]


def _activations(decision: TrainDecision, report: StepReport) -> tuple[int, ...]:
    """The peak over the devices of each pipeline rank."""
    per_stage = decision.num_devices // decision.pipeline_model_parallel_size
    by_rank = [memory.activations for memory in sorted(report.memory, key=lambda one: one.rank)]
    return tuple(
        max(by_rank[first : first + per_stage]) for first in range(0, len(by_rank), per_stage)
    )
