"""The conclusion of trials of training runs.

It recalibrates each trial from the others, and names the winner and the regret of the first choice.
A budget may leave the first choice without a trial: it stays the winner unless a trial was faster
than its recalibrated prediction.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tuner.config.train import TrainDecision
from tuner.costs.residuals import Residual
from tuner.plans.train import Plan, TrainPrediction, TrialSummary, VerifiedPlan
from tuner.units import format_s
from tuner.verify.measured_steps import (
    ape,
    corrected_s,
    factors,
    fitted_residual,
    measured_ratio,
    measured_s,
    median_error_s,
    median_if_all,
    recalibrated_step_s,
)
from tuner.verify.records import Accuracy, Extrapolated, Trial, TrialRecord, Verified
from tuner.verify.space import TrainSpace

HALVING_ERROR: Final = 0.08
"""Half a 90 % band of what each halving of a job may change, relative: caches, memory and switches
behave differently in smaller jobs; our estimate. Independent, so it grows as the square root."""

REDUCTION: Final = ("data_communication", "once")
"""Causes in `TrainPrediction.breakdown_s` of gradient reduction."""
REDUCTION_ERROR: Final = 0.5
"""Half a 90 % band of gradient reduction over more replicas than were launched; our estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Number of launches and their steps."""

    trials: int
    """Total launches, those of earlier calls included."""
    steps: int
    """Timed steps of each."""
    parallel: int = 1
    """Launches in parallel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Callbacks for the progress of trials."""

    started: Callable[[TrainDecision, float], None]
    """Callback before a launch: its decision and predicted step time in seconds."""
    ended: Callable[[TrialRecord], None]
    """Callback after a launch: its record, already written."""


def conclude(
    plan: Plan,
    records: Sequence[TrialRecord],
    *,
    prior: Residual,
    notes: tuple[str, ...] = (),
    space: TrainSpace | None = None,
) -> Verified:
    """Recalibrate, name the winner, and compute the accuracy of the predictions.

    Args:
        plan: that was verified.
        records: of all trials.
        prior: residual that the predictions include already.
        notes: to store with the conclusion.
        space: prices whole jobs; needed where smaller ones are among the trials, or none is of the
            plan's own choice.
    """
    records = sorted(records, key=lambda record: record.number)
    ran = [record for record in records if record.status == "ok"]
    residual = fitted_residual(records, prior=prior)
    jobs = sorted(_joined(ran), key=_size)
    steps = {job.decision: _whole_step(job, space, residual) for job in jobs}
    measured = {record.decision for record in ran if record.scale is None or space is None}
    first = None if plan.decision is None else steps.get(plan.decision)
    untried = plan.decision not in {record.decision for record in records}
    if space is not None and plan.decision is not None and ran and untried:
        choice = _untried_step(space.predicted(plan.decision), ran)
        fastest_s = min(step.step_time_s for step in steps.values())
        if choice.step_time_s < fastest_s:
            notes = (*notes, _stays_note(choice.step_time_s, fastest_s=fastest_s))
        steps[plan.decision] = choice
    winner = min(steps, key=lambda decision: steps[decision].step_time_s, default=None)
    best = None if winner is None else steps[winner]
    return Verified(
        trials=tuple(
            _trial(
                record, records, None if record.decision in measured else steps.get(record.decision)
            )
            for record in records
        ),
        winner=winner,
        winner_step_s=None if best is None else best.step_time_s,
        winner_extrapolated=None if winner in measured else best,
        regret_ratio=first.step_time_s / best.step_time_s - 1.0 if first and best else None,
        tie=first is not None
        and best is not None
        and first.step_time_s_band[0] <= best.step_time_s_band[1],
        residual=residual,
        accuracy=_accuracy(ran),
        notes=notes,
    )


def _joined(ran: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return one record per job, with the steps of all its launches.

    Only former releases launched a job again that had run.
    """
    joined: dict[object, TrialRecord] = {}
    for record in ran:
        known = joined.setdefault(record.job, record)
        if known is record:
            continue
        steps_s = (*known.measured_steps_s, *record.measured_steps_s)
        median_s = statistics.median(steps_s or [measured_s(record)])
        joined[record.job] = record.model_copy(
            update={"measured_steps_s": steps_s, "measured_step_s": median_s}
        )
    return tuple(joined.values())


def _size(record: TrialRecord) -> tuple[float, int]:
    """Order the jobs of one decision, the whole one last, which counts then."""
    if record.scale is None:
        return (math.inf, 0)
    return (record.scale.num_devices, len(record.scale.layers))


def _whole_step(
    record: TrialRecord, space: TrainSpace | None, residual: Residual | None
) -> Extrapolated:
    """Return what a trial says of its whole job; the error is that of the trials' recalibration."""
    if record.scale is None or space is None:
        step_s, noise_s = measured_s(record), 2.0 * median_error_s(record.measured_steps_s)
        return _step(step_s, step_s - noise_s, step_s + noise_s)
    predicted, ratio = space.predicted(record.decision), measured_ratio(record)
    step_s = ratio * predicted.step_time_s
    low_s, high_s = (ratio * end for end in predicted.step_time_s_band)
    if residual is not None:
        halvings = max(0.0, math.log2(predicted.step_time_s / record.predicted_step_s))
        reduction_s = sum(predicted.breakdown_s.get(cause, 0.0) for cause in REDUCTION)
        error_s = step_s * math.hypot(
            residual.band_ratio,
            HALVING_ERROR * math.sqrt(halvings),
            REDUCTION_ERROR * reduction_s / predicted.step_time_s,
        )
        low_s, high_s = step_s - error_s, step_s + error_s
    return _step(step_s, low_s, high_s, *_unseen(record.decision, record.scale.decision))


def _untried_step(predicted: TrainPrediction, ran: Sequence[TrialRecord]) -> Extrapolated:
    """Return the prediction of a decision without a trial, recalibrated by the trials of others."""
    step_s = corrected_s(predicted.step_time_s, predicted.communication_s, by=factors(ran))
    ratio = step_s / predicted.step_time_s
    low_s, high_s = (ratio * end for end in predicted.step_time_s_band)
    return _step(step_s, low_s, high_s, "any job of this decision")


def _step(step_s: float, low_s: float, high_s: float, *unseen: str) -> Extrapolated:
    low_s = max(0.0, low_s)
    return Extrapolated(
        step_time_s=step_s,
        step_time_s_band=(low_s, high_s),
        error_ratio=(high_s - low_s) / (2.0 * step_s) if step_s else 0.0,
        unseen=unseen,
    )


def _stays_note(step_s: float, *, fastest_s: float) -> str:
    return (
        "the plan's own choice was not launched and stays the winner: a step of"
        f" {format_s(step_s)} is predicted with what the trials showed, and the fastest of them"
        f" stands at {format_s(fastest_s)}"
    )


def _unseen(whole: TrainDecision, launched: TrainDecision) -> Iterator[str]:
    """Name what of a whole job its smaller one does not have."""
    if whole.data_parallel_size > launched.data_parallel_size:
        few, many = launched.data_parallel_size, whole.data_parallel_size
        yield f"gradient reduction over {many} replicas ({few} were launched)"
    if whole.pipeline_model_parallel_size > launched.pipeline_model_parallel_size:
        few, many = launched.pipeline_model_parallel_size, whole.pipeline_model_parallel_size
        yield f"a pipeline of {many} ranks ({few} were launched)"


def verified_plan(neighbourhood: TrainSpace, verified: Verified) -> VerifiedPlan:
    """Wrap a plan with its evidence; launch files are for the winner.

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
                # The step of a scaled-down job is not one of this decision.
                measured_step_s=trial.measured_step_s if trial.scale is None else None,
            )
            for trial in verified.trials
        ),
    )


def _trial(
    record: TrialRecord, records: Sequence[TrialRecord], extrapolated: Extrapolated | None
) -> Trial:
    return Trial(
        decision=record.decision,
        scale=record.scale,
        extrapolated=extrapolated,
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
    # Other engines than the reference step need not report activations.
    memory = (
        pair
        for record in ran
        if record.measured_activation_bytes
        for pair in zip(
            record.predicted_activation_bytes, record.measured_activation_bytes, strict=True
        )
    )
    return Accuracy(
        predicted_median_ape=median_if_all(
            ape((record.predicted_step_s, measured_s(record)) for record in ran)
        ),
        recalibrated_median_ape=median_if_all(
            ape((recalibrated_step_s(record, ran), measured_s(record)) for record in ran)
        ),
        activation_max_ape=max(ape(memory), default=None),
        rank_of_measured_best=_rank_of_best(ran),
    )


def _rank_of_best(ran: Sequence[TrialRecord]) -> int | None:
    if not ran:
        return None
    best = min(ran, key=measured_s)
    return 1 + sum(record.predicted_step_s < best.predicted_step_s for record in ran)
