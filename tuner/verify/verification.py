"""The verification loop: propose, launch, record, and at the end conclude.

    for each proposal of the study, until enough trials are measured:
        launch it; tell the study, which keeps its record
    when two fail for the same reason, begin no more
    when nothing is left but what other processes launch, wait for them
    while noise alone keeps the order of the two fastest open, launch them again
    recalibrate each trial from the others; name the winner and the regret of the first choice

A trial that hangs, runs out of memory or crashes is a result like any other. Everything that
happens outside enters as an argument: the launcher, and the study. Several processes may run this
loop on one study: `Effort` counts the trials of all, and each concludes from all records.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.costs.residuals import Residual
from tuner.errors import StudyError
from tuner.plan import Plan, TrainDecision, TrialSummary, VerifiedPlan
from tuner.verify.budget.estimates import estimates, pooled_by_scale
from tuner.verify.budget.possible import Option, Possible
from tuner.verify.budget.scheduler import Spending
from tuner.verify.evidence import contenders, is_tie, measured_s, slower_than
from tuner.verify.flights import in_flight
from tuner.verify.identical_failures import FailureWatch
from tuner.verify.launcher import Launch, TrialLauncher, never_hopeless
from tuner.verify.launches import launch_of, launched, record_of
from tuner.verify.neighbourhood import Around
from tuner.verify.proposal import Origin, Proposal
from tuner.verify.recalibration import fitted_residual, recalibrated_step_s
from tuner.verify.records import Accuracy, Trial, TrialRecord, Verified
from tuner.verify.under_way import folder_of

if TYPE_CHECKING:
    # Optuna is imported by whoever makes the study, not by whoever reads records.
    from tuner.verify.search import StudySearch, Wish
    from tuner.verify.study.claims import Progress


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
    effort: Effort,
    launch: TrialLauncher,
    scratch: Path,
    watcher: Watcher,
    begin: Callable[[Path, Proposal], None] = lambda _folder, _proposal: None,
    stop: Callable[[], None] = lambda: None,
    possible: Possible | None = None,
    spending: Spending | None = None,
    failures: FailureWatch | None = None,
) -> tuple[TrialRecord, ...]:
    """Launch proposals until there are enough trials or nothing new is left to launch.

    Args:
        neighbourhood: where decisions lie.
        study: that proposes them, and keeps their records.
        effort: how much to launch.
        launch: runs one trial.
        scratch: folder of the folders of trials.
        watcher: told about every launch.
        begin: called before a launch, with the folder of its trial.
        stop: ends what runs beside, when this is left by an exception.
        possible: what smaller jobs may be launched; None: whole ones only.
        spending: a budget that decides what is launched; None: `effort` alone does.
        failures: says when trials fail alike, so that no more are begun.

    Returns:
        The records of all trials of the study, by number, whichever process launched them.
    """
    jobs = possible or Possible(around=neighbourhood)
    watch = failures or FailureWatch()
    wanted = partial(_wishes, around=neighbourhood, effort=effort, spending=spending)

    def wishes(progress: "Progress") -> list["Wish"]:
        if watch.is_over(progress.records):
            return []
        again = _again(progress, watch, jobs) if _trials_left(progress, effort) else []
        return [*again, *wanted(progress)]

    with in_flight(effort.parallel, stop=stop) as flights:
        while True:
            found = study.next(wishes) if flights.has_room else None
            if isinstance(found, Proposal):
                asked = _launch(jobs, found, effort, scratch, study.records, spending)
                begin(asked.folder, found)
                watcher.started(asked.decision, asked.predicted.step_time_s)
                flights.start(found, partial(launched, launch, asked))
            elif len(flights):
                ended, result = flights.first_ended()
                record = record_of(_option(jobs, ended), ended, result)
                if study.tell(ended, record):
                    watcher.ended(record)
            elif found is None:
                return study.records
            else:
                study.wait(found)


def _wishes(
    progress: "Progress", *, around: Around, effort: Effort, spending: Spending | None
) -> list["Wish"]:
    """Say what to launch next: new decisions, then the two fastest again."""
    from tuner.verify.search import Wish

    records = progress.records
    trials = _trials_left(progress, effort)
    under_way = [(one.decision, one.scale) for one in progress.open]
    wishes = []
    if spending is None or spending.holds_everything(records, trials=trials):
        has_room = spending is None or spending.has_room(under_way)
        wishes += [Wish()] if trials and has_room else []
    else:
        choice = spending.next(records, under_way=under_way, trials=trials)
        if choice is not None:
            origin = _origin(around, choice.job.candidate)
            job = choice.job
            wishes.append(Wish(decision=job.candidate, scale=job.scale, origin=origin))
    again = None if progress.open else _repeated(_whole(records), effort)
    if again is None or (spending is not None and not spending.affords(again, records)):
        return wishes
    return [*wishes, Wish(decision=again)]


def _trials_left(progress: "Progress", effort: Effort) -> int:
    begun = len([one for one in progress.records if one.origin != "repeat"]) + len(progress.open)
    return max(0, effort.trials - begun)


def _again(progress: "Progress", watch: FailureWatch, jobs: Possible) -> list["Wish"]:
    """Return what failed alike in an earlier call, each once in this one."""
    from tuner.verify.search import Wish

    failed = watch.to_repeat(progress.records)
    last = max((one.number for one in failed), default=-1)
    begun = [(one.decision, one.scale) for one in progress.records if one.number > last]
    begun += [(one.decision, one.scale) for one in progress.open]
    found = dict.fromkeys((one.decision, one.scale) for one in failed)
    return [
        Wish(decision=decision, scale=scale, origin="repeat")
        for decision, scale in found
        if (decision, scale) not in begun and (scale or decision).num_devices <= jobs.most_devices
    ]


def _origin(around: Around, decision: TrainDecision) -> Origin:
    if decision == around.plan.decision:
        return "plan"
    return "alternative" if decision in around.candidates.values() else "neighbour"


def _whole(records: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the trials that launched a whole job."""
    return tuple(one for one in records if one.scale is None)


def _repeated(records: Sequence[TrialRecord], effort: Effort) -> TrainDecision | None:
    """Return one of the two fastest while noise alone keeps their order open."""
    again = [one.decision for one in records if one.origin == "repeat"]
    found = contenders(records)
    if found is None or len(again) >= 2 * effort.repeats:
        return None
    return min(found, key=lambda one: again.count(one.decision)).decision


def _option(jobs: Possible, proposal: Proposal) -> Option:
    found = jobs.option(proposal.decision, proposal.scale)
    if found is None:
        raise StudyError(
            f"trial {proposal.number} is of a smaller job that this plan cannot price; use one"
            " release of moetune everywhere"
        )
    return found


def _launch(
    jobs: Possible,
    proposal: Proposal,
    effort: Effort,
    scratch: Path,
    records: Sequence[TrialRecord],
    spending: Spending | None,
) -> Launch:
    return launch_of(
        _option(jobs, proposal),
        timed_steps=effort.steps,
        folder=folder_of(scratch, proposal.number),
        latest_s=math.inf if spending is None else spending.latest_s(),
        hopeless=slower_than(_whole(records)) if proposal.scale is None else never_hopeless,
    )


def conclude(
    plan: Plan,
    records: Sequence[TrialRecord],
    *,
    prior: Residual,
    notes: tuple[str, ...] = (),
    possible: Possible | None = None,
) -> Verified:
    """Recalibrate, name the winner, and say how good the predictions were.

    Args:
        plan: that was verified.
        records: of all trials.
        prior: factors that the predictions hold already.
        notes: to be kept with what is found.
        possible: the jobs that were launched; needed where smaller ones are among them.
    """
    notes = (*notes, *_open_order(_whole(records)))
    records = sorted(pooled_by_scale(records), key=lambda one: one.number)
    ran = [record for record in records if record.status == "ok"]
    found = Verified(
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
        return _judged_by_estimates(found, plan, records, possible)
    winner = min(ran, key=measured_s, default=None)
    first = next((record for record in ran if record.decision == plan.decision), None)
    return found.model_copy(
        update={
            "winner": winner.decision if winner else None,
            "winner_step_s": measured_s(winner) if winner else None,
            "regret_ratio": measured_s(first) / measured_s(winner) - 1.0
            if first and winner
            else None,
            "tie": first is not None and winner is not None and is_tie(first, winner),
        }
    )


def _judged_by_estimates(
    found: Verified, plan: Plan, records: Sequence[TrialRecord], possible: Possible
) -> Verified:
    """Compare whole jobs by what smaller ones say of them."""
    known = estimates(possible, records)
    trials = tuple(
        trial.model_copy(update={"extrapolated": known.extrapolated(trial.decision)})
        for trial in found.trials
    )
    winner, first = known.best, plan.decision
    if winner is None or first is None:
        return found
    winner_s, first_s = known.step_s(winner), known.step_s(first)
    return found.model_copy(
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
                # What smaller jobs took is no step of this decision.
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
