"""The verification loop: propose, launch, record, and at the end conclude.

    for each proposal of the study, until enough trials are measured:
        launch it; write its record; tell the study
    while noise alone keeps the order of the two fastest open, launch them again
    recalibrate each trial from the others; name the winner and the regret of the first choice

A trial that hangs, runs out of memory or crashes is a result like any other. Everything that
happens outside enters as an argument: the launcher, and where a record is written.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from profilers.steps.config import StepReport
from tuner.costs.residuals import Residual
from tuner.plan import Plan, TrainDecision, TrialSummary, VerifiedPlan
from tuner.spec.capabilities import programs
from tuner.verify.evidence import contenders, is_tie, measured_s, pooled, slower_than
from tuner.verify.flights import in_flight
from tuner.verify.launcher import Launch, LaunchResult, TrialLauncher
from tuner.verify.neighbourhood import Around
from tuner.verify.proposal import Proposal
from tuner.verify.recalibration import fitted_residual, recalibrated_step_s
from tuner.verify.records import Accuracy, Trial, TrialRecord, Verified

if TYPE_CHECKING:
    # Optuna is imported by whoever makes the study, not by whoever reads records.
    from tuner.verify.search import StudySearch

REFERENCE: Final = "reference"
"""The engine whose operations the cost model lists."""

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
    parallel: int = 1
    """Launches at a time."""
    repeats: int = 0
    """Rounds in which the two fastest are launched again while their noise overlaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Who is told what happens, as it happens."""

    started: Callable[[TrainDecision, float], None]
    """A launch begins: its decision and predicted step seconds."""
    ended: Callable[[TrialRecord], None]
    """A launch has ended and its record is written."""


def run_trials(
    neighbourhood: Around,
    study: "StudySearch",
    *,
    finished: Sequence[TrialRecord],
    effort: Effort,
    launch: TrialLauncher,
    scratch: Path,
    write: Callable[[TrialRecord], None],
    watcher: Watcher,
    under_way: Sequence[Proposal] = (),
    begin: Callable[[Path, Proposal], None] = lambda _folder, _proposal: None,
    stop: Callable[[], None] = lambda: None,
) -> tuple[TrialRecord, ...]:
    """Launch proposals until there are enough trials or nothing new is left to launch.

    Args:
        neighbourhood: where decisions lie.
        study: that proposes them.
        finished: trials that have a record already.
        effort: how much to launch.
        launch: runs one trial.
        scratch: folder of the folders of trials.
        write: keeps a record.
        watcher: told about every launch.
        under_way: trials that an earlier process started and that are awaited first.
        begin: called before a launch, with the folder of its trial.
        stop: ends what runs beside, when this is left by an exception.
    """
    records = list(finished)
    awaited = list(under_way)

    def proposed(open_trials: int) -> Proposal | None:
        if awaited:
            return awaited.pop(0)
        if len([one for one in records if one.origin != "repeat"]) + open_trials < effort.trials:
            new = study.next()
            if new is not None:
                return new
        return None if open_trials else _repeat(study, records, effort)

    with in_flight(effort.parallel, stop=stop) as flights:
        while True:
            while flights.has_room:
                proposal = proposed(len(flights))
                if proposal is None:
                    break
                asked = _launch(neighbourhood, proposal, effort, scratch, records)
                begin(asked.folder, proposal)
                watcher.started(proposal.decision, asked.predicted.step_time_s)
                flights.start(proposal, partial(launch, asked))
            if not len(flights):
                return tuple(records)
            ended, result = flights.first_ended()
            record = _record(neighbourhood, ended, result)
            write(record)
            study.tell(ended, record)
            records.append(record)
            watcher.ended(record)


def _repeat(
    study: "StudySearch", records: Sequence[TrialRecord], effort: Effort
) -> Proposal | None:
    """Propose one of the two fastest again while noise alone keeps their order open."""
    again = [one.decision for one in records if one.origin == "repeat"]
    found = contenders(records)
    if found is None or len(again) >= 2 * effort.repeats:
        return None
    return study.repeat(min(found, key=lambda one: again.count(one.decision)).decision)


def conclude(
    plan: Plan, records: Sequence[TrialRecord], *, prior: Residual, notes: tuple[str, ...] = ()
) -> Verified:
    """Recalibrate, name the winner, and say how good the predictions were."""
    notes = (*notes, *_open_order(records))
    records = pooled(records)
    ran = [record for record in records if record.status == "ok"]
    winner = min(ran, key=measured_s, default=None)
    first = next((record for record in ran if record.decision == plan.decision), None)
    return Verified(
        trials=tuple(_trial(record, records) for record in records),
        winner=winner.decision if winner else None,
        winner_step_s=measured_s(winner) if winner else None,
        regret_ratio=measured_s(first) / measured_s(winner) - 1.0 if first and winner else None,
        tie=first is not None and winner is not None and is_tie(first, winner),
        residual=fitted_residual(records, prior=prior),
        accuracy=_accuracy(ran),
        notes=notes,
    )


def _open_order(records: Sequence[TrialRecord]) -> tuple[str, ...]:
    """Say so where repeats did not part the two fastest."""
    found = contenders(records)
    if found is None or not any(record.origin == "repeat" for record in records):
        return ()
    return ("the two fastest differ by less than the noise of their steps: a tie",)


def verified_plan(neighbourhood: Around, verified: Verified) -> VerifiedPlan:
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


def _launch(
    neighbourhood: Around,
    proposal: Proposal,
    effort: Effort,
    scratch: Path,
    records: Sequence[TrialRecord],
) -> Launch:
    predicted = neighbourhood.predicted(proposal.decision)
    # One step more is metered for its memory, which slows it down.
    steps = effort.steps + WARMUP_STEPS + 2
    return Launch(
        plan=neighbourhood.plan,
        decision=proposal.decision,
        predicted=predicted,
        steps=effort.steps,
        warmup_steps=WARMUP_STEPS,
        folder=scratch / f"{proposal.number:04d}",
        deadline_s=START_UP_S + SLOWER_THAN_PREDICTED * steps * predicted.step_time_s,
        hopeless=slower_than(records),
    )


def _record(neighbourhood: Around, proposal: Proposal, result: LaunchResult) -> TrialRecord:
    decision, report, metrics = proposal.decision, result.report, result.metrics
    predicted = neighbourhood.predicted(decision)
    if report is not None:
        steps_s, activation_bytes = report.step_s, _activations(decision, report)
    elif metrics is not None:
        steps_s, activation_bytes = metrics.steps_s, metrics.activation_bytes
    else:
        steps_s, activation_bytes = (), ()
    return TrialRecord(
        number=proposal.number,
        origin=proposal.origin,
        decision=decision,
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
        engine=engine_of(neighbourhood.plan),
        release=report.libraries.get("torch", "") if report else "",
        device=report.device if report else "",
    )


def engine_of(plan: Plan) -> str:
    """Name the engine that a plan's trials run: the reference step where it was measured."""
    return REFERENCE if plan.provenance.device_kind else programs(plan.emit)[0]


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
    raw = [_ape(record.predicted_step_s, measured_s(record)) for record in ran]
    again = [
        _ape(corrected, measured_s(record))
        for record in ran
        if (corrected := recalibrated_step_s(record, ran)) is not None
    ]
    memory = [
        _ape(predicted, measured)
        for record in ran
        # Engines other than the reference step need not tell.
        if record.measured_activation_bytes
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
    best = min(ran, key=measured_s)
    return 1 + sum(record.predicted_step_s < best.predicted_step_s for record in ran)


def _ape(predicted: float, measured: float) -> float:
    return abs(predicted - measured) / measured if measured else 0.0
