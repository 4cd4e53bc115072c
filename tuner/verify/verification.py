"""The verification loop: propose, launch, record, conclude.

    for each proposal of the study, until there are enough trials:
        launch it; tell the study, which keeps its record
    after two failures for the same reason, start no more
    if only other processes still run trials, wait for them
    while the two fastest are a tie within noise, repeat them
    recalibrate each trial from the others; name the winner and the regret of the first choice

A trial that hangs, runs out of memory or crashes is a result like any other. Side effects enter as
arguments: the launcher and the study. Several processes may run this loop on one study: `Effort`
counts the trials of all, and each concludes from all records.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.config.train import TrainDecision
from tuner.costs.residuals import Residual
from tuner.errors import StudyError
from tuner.plans.train import Plan, TrialSummary, VerifiedPlan
from tuner.verify.budget.estimates import estimates, pooled_by_scale
from tuner.verify.budget.scheduler import Spending
from tuner.verify.budget.trial_options import TrialOption, TrialOptions
from tuner.verify.durable_trials import trial_folder
from tuner.verify.evidence import contenders, is_tie, measured_s, slower_than
from tuner.verify.flights import running_launches
from tuner.verify.identical_failures import FailureWatch
from tuner.verify.launcher import Launch, TrialLauncher, never_hopeless
from tuner.verify.launches import build_launch, run_launch, to_record
from tuner.verify.neighbourhood import TrainSpace
from tuner.verify.proposal import Origin, Proposal
from tuner.verify.recalibration import fitted_residual, recalibrated_step_s
from tuner.verify.records import Accuracy, Trial, TrialRecord, Verified

if TYPE_CHECKING:
    # Optuna is imported where a study is opened, not where records are read.
    from tuner.verify.search import LaunchRequest, StudySearch
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


def run_trials(
    neighbourhood: TrainSpace,
    study: "StudySearch",
    *,
    effort: Effort,
    launch: TrialLauncher,
    scratch: Path,
    watcher: Watcher,
    begin: Callable[[Path, Proposal], None] = lambda _folder, _proposal: None,
    stop: Callable[[], None] = lambda: None,
    possible: TrialOptions | None = None,
    spending: Spending | None = None,
    failures: FailureWatch | None = None,
) -> tuple[TrialRecord, ...]:
    """Launch proposals until there are enough trials or nothing new is left.

    Args:
        neighbourhood: where decisions lie.
        study: proposes decisions and keeps their records.
        effort: how much to launch.
        launch: runs one trial.
        scratch: folder of the folders of trials.
        watcher: called for every launch.
        begin: called before a launch, with the folder of its trial.
        stop: ends parallel launches if this is left by an exception.
        possible: what smaller jobs may be launched; None: whole ones only.
        spending: a budget that decides what is launched; None: `effort` alone does.
        failures: stops the trials after identical failures.

    Returns:
        The records of all trials of the study, by number, whichever process launched them.
    """
    jobs = possible or TrialOptions(space=neighbourhood)
    watch = failures or FailureWatch()
    wanted = partial(_requests, space=neighbourhood, effort=effort, spending=spending)

    def requests(progress: "StudySnapshot") -> list["LaunchRequest"]:
        if watch.is_over(progress.records):
            return []
        retries = _retries(progress, watch, jobs) if _trials_left(progress, effort) else []
        return [*retries, *wanted(progress)]

    with running_launches(effort.parallel, stop=stop) as flights:
        while True:
            next_step = study.propose(requests) if flights.has_room else None
            if isinstance(next_step, Proposal):
                request = _launch(jobs, next_step, effort, scratch, study.records, spending)
                begin(request.folder, next_step)
                watcher.started(request.decision, request.predicted.step_time_s)
                flights.start(next_step, partial(run_launch, launch, request))
            elif len(flights):
                ended, result = flights.wait_for_first()
                record = to_record(_option(jobs, ended), ended, result)
                if study.record(ended, record):
                    watcher.ended(record)
            elif next_step is None:
                return study.records
            else:
                study.wait(next_step)


def _requests(
    progress: "StudySnapshot", *, space: TrainSpace, effort: Effort, spending: Spending | None
) -> list["LaunchRequest"]:
    """Return what to launch next: new decisions, then repeats of the two fastest."""
    from tuner.verify.search import LaunchRequest

    records = progress.records
    trials = _trials_left(progress, effort)
    running = [(one.decision, one.scale) for one in progress.open]
    requests = []
    if spending is None or spending.holds_everything(records, trials=trials):
        has_room = spending is None or spending.has_room(running)
        requests += [LaunchRequest()] if trials and has_room else []
    else:
        choice = spending.next(records, running=running, trials=trials)
        if choice is not None:
            origin = _origin(space, choice.job.candidate)
            job = choice.job
            requests.append(LaunchRequest(decision=job.candidate, scale=job.scale, origin=origin))
    repeat = None if progress.open else _repeat_of_closest(_whole(records), effort)
    if repeat is None or (spending is not None and not spending.affords(repeat, records)):
        return requests
    return [*requests, LaunchRequest(decision=repeat)]


def _trials_left(progress: "StudySnapshot", effort: Effort) -> int:
    begun = len([one for one in progress.records if one.origin != "repeat"]) + len(progress.open)
    return max(0, effort.trials - begun)


def _retries(
    progress: "StudySnapshot", watch: FailureWatch, jobs: TrialOptions
) -> list["LaunchRequest"]:
    """Return the identical failures of an earlier call, to retry each once."""
    from tuner.verify.search import LaunchRequest

    failed = watch.to_repeat(progress.records)
    last = max((one.number for one in failed), default=-1)
    begun = [(one.decision, one.scale) for one in progress.records if one.number > last]
    begun += [(one.decision, one.scale) for one in progress.open]
    failed_jobs = dict.fromkeys((one.decision, one.scale) for one in failed)
    return [
        LaunchRequest(decision=decision, scale=scale, origin="repeat")
        for decision, scale in failed_jobs
        if (decision, scale) not in begun and (scale or decision).num_devices <= jobs.most_devices
    ]


def _origin(space: TrainSpace, decision: TrainDecision) -> Origin:
    if decision == space.plan.decision:
        return "plan"
    return "alternative" if decision in space.candidates.values() else "neighbour"


def _whole(records: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the full-scale trials."""
    return tuple(one for one in records if one.scale is None)


def _repeat_of_closest(records: Sequence[TrialRecord], effort: Effort) -> TrainDecision | None:
    """Return the one of the two fastest to repeat while they are a tie within noise."""
    repeated_decisions = [one.decision for one in records if one.origin == "repeat"]
    closest = contenders(records)
    if closest is None or len(repeated_decisions) >= 2 * effort.repeats:
        return None
    return min(closest, key=lambda one: repeated_decisions.count(one.decision)).decision


def _option(jobs: TrialOptions, proposal: Proposal) -> TrialOption:
    option = jobs.option(proposal.decision, proposal.scale)
    if option is None:
        raise StudyError(
            f"trial {proposal.number} is of a scaled-down job that this plan cannot price; use one"
            " release of moetune everywhere"
        )
    return option


def _launch(
    jobs: TrialOptions,
    proposal: Proposal,
    effort: Effort,
    scratch: Path,
    records: Sequence[TrialRecord],
    spending: Spending | None,
) -> Launch:
    return build_launch(
        _option(jobs, proposal),
        timed_steps=effort.steps,
        folder=trial_folder(scratch, proposal.number),
        latest_s=math.inf if spending is None else spending.latest_s(),
        hopeless=slower_than(_whole(records)) if proposal.scale is None else never_hopeless,
    )


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
