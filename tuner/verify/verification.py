"""The verification loop: propose, launch, record, and at the end conclude.

    for each proposal of the study, until enough trials are measured:
        launch it; write its record; tell the study
    recalibrate each trial from the others; name the winner and the regret of the first choice

A trial that hangs, runs out of memory or crashes is a result like any other. Everything that
happens outside enters as an argument: the launcher, and where a record is written.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from profilers.steps.config import StepReport
from tuner.costs.residuals import Residual
from tuner.launch.step_config import step_config
from tuner.plan import Plan, TrainDecision, TrialSummary, VerifiedPlan
from tuner.verify.launcher import Launcher, LaunchResult
from tuner.verify.neighbourhood import Neighbourhood
from tuner.verify.recalibration import fitted_residual, recalibrated_step_s
from tuner.verify.records import Accuracy, Trial, TrialRecord, Verified

if TYPE_CHECKING:
    # Optuna is imported by whoever makes the study, not by whoever reads records.
    from tuner.verify.search import Proposal, StudySearch

WARMUP_STEPS: Final = 2
START_UP_S: Final = 90.0
"""Generous time for processes to start and meet, before a trial counts as hung."""

SLOWER_THAN_PREDICTED: Final = 10.0
"""Times the predicted step that a trial may take before it counts as hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to launch."""

    trials: int
    """Launches in all, those of an earlier call included."""
    steps: int
    """Timed steps of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Who is told what happens, as it happens."""

    started: Callable[[TrainDecision, float], None]
    """A launch begins: its decision and predicted step seconds."""
    ended: Callable[[TrialRecord], None]
    """A launch has ended and its record is written."""


def run_trials(
    neighbourhood: Neighbourhood,
    study: "StudySearch",
    *,
    finished: Sequence[TrialRecord],
    effort: Effort,
    launch: Launcher,
    scratch: Path,
    write: Callable[[TrialRecord], None],
    watcher: Watcher,
) -> tuple[TrialRecord, ...]:
    """Launch proposals until there are enough trials or nothing new is left to launch."""
    records = list(finished)
    while len(records) < effort.trials:
        proposal = study.next()
        if proposal is None:
            break
        predicted = neighbourhood.predicted(proposal.decision)
        watcher.started(proposal.decision, predicted.step_time_s)
        result = _launched(
            neighbourhood.plan, proposal, effort, launch, scratch, predicted_s=predicted.step_time_s
        )
        record = _record(neighbourhood, proposal, result)
        write(record)
        study.tell(proposal, record)
        records.append(record)
        watcher.ended(record)
    return tuple(records)


def conclude(
    plan: Plan, records: Sequence[TrialRecord], *, prior: Residual, notes: tuple[str, ...] = ()
) -> Verified:
    """Recalibrate, name the winner, and say how good the predictions were."""
    ran = [record for record in records if record.status == "ok"]
    winner = min(ran, key=_measured, default=None)
    first = next((record for record in ran if record.decision == plan.decision), None)
    return Verified(
        trials=tuple(_trial(record, records) for record in records),
        winner=winner.decision if winner else None,
        winner_step_s=_measured(winner) if winner else None,
        regret_ratio=_measured(first) / _measured(winner) - 1.0 if first and winner else None,
        tie=first is not None and winner is not None and _is_tie(first, winner),
        residual=fitted_residual(records, prior=prior),
        accuracy=_accuracy(ran),
        notes=notes,
    )


def verified_plan(neighbourhood: Neighbourhood, verified: Verified) -> VerifiedPlan:
    """Wrap a plan with its evidence; the winner is what gets launched.

    Raises:
        ValueError: no trial ran, so there is nothing to launch.
    """
    if verified.winner is None:
        raise ValueError("no trial ran")
    return VerifiedPlan(
        plan=neighbourhood.plan,
        decision=verified.winner,
        predicted=neighbourhood.predicted(verified.winner),
        trials=tuple(
            TrialSummary(
                decision=trial.decision,
                status=trial.status,
                predicted_step_s=trial.predicted_step_s,
                measured_step_s=trial.measured_step_s,
            )
            for trial in verified.trials
        ),
    )


def _launched(
    plan: Plan,
    proposal: "Proposal",
    effort: Effort,
    launch: Launcher,
    scratch: Path,
    *,
    predicted_s: float,
) -> LaunchResult:
    config = step_config(plan, proposal.decision, steps=effort.steps, warmup_steps=WARMUP_STEPS)
    # One step more is metered for its memory, which slows it down.
    steps = effort.steps + WARMUP_STEPS + 2
    deadline_s = START_UP_S + SLOWER_THAN_PREDICTED * steps * predicted_s
    return launch(config, folder=scratch / f"{proposal.trial.number:04d}", deadline_s=deadline_s)


def _record(
    neighbourhood: Neighbourhood, proposal: "Proposal", result: LaunchResult
) -> TrialRecord:
    decision, report = proposal.decision, result.report
    predicted = neighbourhood.predicted(decision)
    return TrialRecord(
        number=proposal.trial.number,
        origin=proposal.origin,
        decision=decision,
        status=result.status,
        reason=result.reason,
        predicted_step_s=predicted.step_time_s,
        predicted_communication_s=predicted.communication_s,
        predicted_activation_bytes=predicted.activation_bytes,
        measured_steps_s=report.step_s if report else (),
        measured_step_s=statistics.median(report.step_s) if report else None,
        measured_activation_bytes=_activations(decision, report) if report else (),
        measured_loads=report.loads[-1] if report and report.loads else (),
        wall_s=result.wall_s,
        engine=neighbourhood.machine.residual.engine,
        release=report.libraries.get("torch", "") if report else "",
        device=report.device if report else "",
    )


def _activations(decision: TrainDecision, report: StepReport) -> tuple[int, ...]:
    """The fullest device of each pipeline rank."""
    per_stage = decision.num_devices // decision.pipeline_model_parallel_size
    by_rank = [memory.activations for memory in sorted(report.memory, key=lambda one: one.rank)]
    return tuple(
        max(by_rank[first : first + per_stage]) for first in range(0, len(by_rank), per_stage)
    )


def _trial(record: TrialRecord, records: Sequence[TrialRecord]) -> Trial:
    return Trial(
        decision=record.decision,
        origin=record.origin,
        status=record.status,
        reason=record.reason,
        predicted_step_s=record.predicted_step_s,
        recalibrated_step_s=recalibrated_step_s(record, records),
        measured_step_s=record.measured_step_s,
        predicted_activation_bytes=record.predicted_activation_bytes,
        recalibrated_activation_bytes=record.predicted_activation_bytes,
        measured_activation_bytes=record.measured_activation_bytes,
    )


def _accuracy(ran: Sequence[TrialRecord]) -> Accuracy:
    raw = [_ape(record.predicted_step_s, _measured(record)) for record in ran]
    again = [
        _ape(corrected, _measured(record))
        for record in ran
        if (corrected := recalibrated_step_s(record, ran)) is not None
    ]
    memory = [
        _ape(predicted, measured)
        for record in ran
        for predicted, measured in zip(
            record.predicted_activation_bytes, record.measured_activation_bytes, strict=True
        )
    ]
    return Accuracy(
        predicted_median_ape=statistics.median(raw) if raw else None,
        recalibrated_median_ape=statistics.median(again) if again else None,
        activation_max_ape=max(memory, default=None),
        rank_of_measured_best=_rank_of_best(ran),
    )


def _rank_of_best(ran: Sequence[TrialRecord]) -> int | None:
    if not ran:
        return None
    best = min(ran, key=_measured)
    return 1 + sum(record.predicted_step_s < best.predicted_step_s for record in ran)


def _is_tie(first: TrialRecord, winner: TrialRecord) -> bool:
    """Whether the medians differ by less than their standard errors, twice over.

    The median's standard error is 1.2533 sigma / sqrt(n), with sigma from the interquartile range.
    """
    noise = _median_error(first.measured_steps_s) + _median_error(winner.measured_steps_s)
    return _measured(first) - _measured(winner) <= 2.0 * noise


def _median_error(steps_s: Sequence[float]) -> float:
    if len(steps_s) < 2:
        return 0.0
    low, _, high = statistics.quantiles(steps_s, n=4)
    return 1.2533 * (high - low) / 1.349 / math.sqrt(len(steps_s))


def _ape(predicted: float, measured: float) -> float:
    return abs(predicted - measured) / measured if measured else 0.0


def _measured(record: TrialRecord) -> float:
    if record.measured_step_s is None:
        raise ValueError(f"trial {record.number} was not measured")
    return record.measured_step_s
