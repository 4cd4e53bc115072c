"""Trials of training runs and their conclusion.

`TrainTrials` launches them in the loop of tuner/verify/loop.py. The conclusion recalibrates each
trial from the others, and names the winner and the regret of the first choice. Side effects enter
as arguments: the launcher and the study.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.config.train import TrainDecision
from tuner.costs.residuals import Residual
from tuner.errors import StudyError
from tuner.plans.train import Plan, TrialSummary, VerifiedPlan
from tuner.verify.budget.extrapolation import estimates, pooled_by_scale
from tuner.verify.budget.scheduler import Spending
from tuner.verify.budget.trial_options import TrialOptions
from tuner.verify.durable_trials import trial_folder
from tuner.verify.evidence import contenders, is_tie, measured_s, slower_than
from tuner.verify.launcher import TrialLauncher, never_hopeless
from tuner.verify.launches import build_launch, run_launch, to_record
from tuner.verify.loop import TrialRuns
from tuner.verify.neighbourhood import TrainSpace
from tuner.verify.proposal import LaunchRequest, Origin, Proposal
from tuner.verify.recalibration import fitted_residual, recalibrated_step_s
from tuner.verify.records import Accuracy, Trial, TrialRecord, Verified

if TYPE_CHECKING:
    # Optuna is imported where a study is opened, not where records are read.
    from tuner.verify.study.shared import StudySnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to launch."""

    trials: int
    """Total launches, those of earlier calls included."""
    steps: int
    """Timed steps of each."""
    parallel: int = 1
    """Launches in parallel."""
    repeats: int = 0
    """Rounds of repeating the two fastest while they are a tie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Callbacks for the progress of trials."""

    started: Callable[[TrainDecision, float], None]
    """Before a launch: its decision and predicted step time in seconds."""
    ended: Callable[[TrialRecord], None]
    """After a launch: its record, already written."""


@dataclass(kw_only=True, eq=False)
class TrainTrials(TrialRuns[TrainDecision, TrialRecord]):
    """Launches training runs, full-scale or scaled down."""

    jobs: TrialOptions
    """The full-scale and scaled-down jobs that may be launched."""
    effort: Effort
    launch: TrialLauncher
    scratch: Path
    """Folder of the folders of trials."""
    watcher: Watcher
    begin: Callable[[Path, Proposal], None] = lambda _folder, _proposal: None
    """Called before a launch, with the folder of its trial."""
    spending: Spending | None = None
    """A budget that decides what is launched; None: `effort` alone does."""

    def start(
        self, proposal: Proposal, records: Sequence[TrialRecord]
    ) -> Callable[[], TrialRecord]:
        """Prepare a trial; return what runs it to its record."""
        option = self.jobs.option(proposal.decision, proposal.scale)
        if option is None:
            raise StudyError(
                f"trial {proposal.number} is of a scaled-down job that this plan cannot price; use"
                " one release of moetune everywhere"
            )
        request = build_launch(
            option,
            timed_steps=self.effort.steps,
            folder=trial_folder(self.scratch, proposal.number),
            latest_s=math.inf if self.spending is None else self.spending.latest_s(),
            hopeless=slower_than(_whole(records)) if proposal.scale is None else never_hopeless,
        )
        self.begin(request.folder, proposal)
        self.watcher.started(request.decision, request.predicted.step_time_s)
        return lambda: to_record(option, proposal, run_launch(self.launch, request))

    def new(self, progress: "StudySnapshot", *, trials: int) -> list[LaunchRequest]:
        """Return the new decisions to launch next."""
        records, spending = progress.records, self.spending
        running = [one.job for one in progress.open]
        if spending is None or spending.holds_everything(records, trials=trials):
            has_room = spending is None or spending.has_room(running)
            return [LaunchRequest()] if trials and has_room else []
        choice = spending.next(records, running=running, trials=trials)
        if choice is None:
            return []
        decision, space = choice.job.candidate, self.jobs.space
        origin: Origin = "plan" if decision == space.plan.decision else "neighbour"
        if origin == "neighbour" and decision in space.candidates:
            origin = "alternative"
        return [LaunchRequest(decision=decision, scale=choice.job.scale, origin=origin)]

    def retry(self, failed: TrialRecord, /) -> bool:
        """Whether a failed trial of an earlier call fits the devices of this one."""
        return (failed.scale or failed.decision).num_devices <= self.jobs.most_devices

    def repeat(self, records: Sequence[TrialRecord]) -> TrainDecision | None:
        """Return the one of the two fastest to repeat while they are a tie within noise."""
        repeated = [one.decision for one in _whole(records) if one.origin == "repeat"]
        closest = contenders(_whole(records))
        if closest is None or len(repeated) >= 2 * self.effort.repeats:
            return None
        decision = min(closest, key=lambda one: repeated.count(one.decision)).decision
        if self.spending is not None and not self.spending.affords(decision, records):
            return None
        return decision


def _whole(records: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the full-scale trials."""
    return tuple(one for one in records if one.scale is None)


def conclude(
    plan: Plan,
    records: Sequence[TrialRecord],
    *,
    prior: Residual,
    notes: tuple[str, ...] = (),
    possible: TrialOptions | None = None,
) -> Verified:
    """Recalibrate, name the winner, and compute the accuracy of the predictions.

    Args:
        plan: that was verified.
        records: of all trials.
        prior: residual that the predictions include already.
        notes: to store with the conclusion.
        possible: the jobs that were launched; needed where smaller ones are among them.
    """
    notes = (*notes, *_open_order(_whole(records)))
    records = sorted(pooled_by_scale(records), key=lambda one: one.number)
    ran = [record for record in records if record.status == "ok"]
    verified = Verified(
        trials=tuple(_trial(record, records) for record in records),
        winner=None,
        winner_step_s=None,
        regret_ratio=None,
        tie=False,
        residual=fitted_residual(records, prior=prior),
        accuracy=_accuracy(ran),
        notes=notes,
    )
    if possible is not None and len(_whole(records)) < len(records):
        return _conclude_from_estimates(verified, plan, records, possible)
    winner = min(ran, key=measured_s, default=None)
    first = next((record for record in ran if record.decision == plan.decision), None)
    return verified.model_copy(
        update={
            "winner": winner.decision if winner else None,
            "winner_step_s": measured_s(winner) if winner else None,
            "regret_ratio": measured_s(first) / measured_s(winner) - 1.0
            if first and winner
            else None,
            "tie": first is not None and winner is not None and is_tie(first, winner),
        }
    )


def _conclude_from_estimates(
    verified: Verified, plan: Plan, records: Sequence[TrialRecord], possible: TrialOptions
) -> Verified:
    """Compare full-scale jobs by extrapolation from scaled-down ones."""
    known = estimates(possible, records)
    trials = tuple(
        trial.model_copy(update={"extrapolated": known.extrapolated(trial.decision)})
        for trial in verified.trials
    )
    winner, first = known.best, plan.decision
    if winner is None or first is None:
        return verified
    winner_s, first_s = known.step_s(winner), known.step_s(first)
    return verified.model_copy(
        update={
            "trials": trials,
            "winner": winner,
            "winner_step_s": winner_s,
            "winner_extrapolated": known.extrapolated(winner),
            "regret_ratio": first_s / winner_s - 1.0 if first_s and winner_s else None,
            "tie": known.is_tie(first, winner),
        }
    )


def _open_order(records: Sequence[TrialRecord]) -> tuple[str, ...]:
    """Note that the two fastest are still a tie after repeats."""
    closest = contenders(records)
    if closest is None or not any(record.origin == "repeat" for record in records):
        return ()
    return ("the two fastest differ by less than the noise of their steps: a tie",)


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


def _trial(record: TrialRecord, records: Sequence[TrialRecord]) -> Trial:
    return Trial(
        decision=record.decision,
        scale=record.scale,
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
    recalibrated = [
        _ape(corrected, measured_s(record))
        for record in ran
        if (corrected := recalibrated_step_s(record, ran)) is not None
    ]
    memory = [
        _ape(predicted, measured)
        for record in ran
        # Other engines than the reference step need not report it.
        if record.measured_activation_bytes
        for predicted, measured in zip(
            record.predicted_activation_bytes, record.measured_activation_bytes, strict=True
        )
    ]
    return Accuracy(
        predicted_median_ape=statistics.median(raw) if raw else None,
        recalibrated_median_ape=statistics.median(recalibrated) if recalibrated else None,
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
