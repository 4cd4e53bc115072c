"""What all trials say of the whole jobs that were tried, whole or smaller.

The plan's own choice is among them even where no trial of it ran: what others measured tells how
far the model is off, and a budget that held none but slower candidates must not make one of those
the winner.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.plan import TrainDecision
from tuner.units import format_ratio
from tuner.verify.budget.extrapolation import Belief, Seen, believed
from tuner.verify.budget.jobs import STATE, Job, Sync
from tuner.verify.budget.possible import Possible
from tuner.verify.evidence import measured_s, median_error_s, pooled
from tuner.verify.records import Extrapolated, TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimates:
    """Step times of the candidates that had a trial which ran, and of the plan's own choice."""

    jobs: tuple[Job, ...]
    """Whole ones, in the order of their first trials."""
    belief: Belief
    seen: tuple[Seen, ...]

    @property
    def best(self) -> TrainDecision | None:
        """The fastest; None where nothing ran."""
        if not self.jobs:
            return None
        return self.jobs[int(self.belief.mean_s_T.argmin())].candidate

    def step_s(self, candidate: TrainDecision) -> float | None:
        """Seconds of a step; None where nothing is known of the candidate."""
        place = self._place(candidate)
        return None if place is None else float(self.belief.mean_s_T[place])

    def is_tie(self, one: TrainDecision, other: TrainDecision) -> bool:
        """Whether the order of two candidates may be another than it seems."""
        first, second = self._place(one), self._place(other)
        if first is None or second is None or first == second:
            return False
        return not self.belief.is_apart(first, second)

    def extrapolated(self, candidate: TrainDecision) -> Extrapolated | None:
        """Say what follows for the whole job of a candidate; None where it was launched itself."""
        place = self._place(candidate)
        if place is None or self._ran_whole(candidate):
            return None
        step_s, error_s = float(self.belief.mean_s_T[place]), self.belief.error_s(place)
        return Extrapolated(
            step_time_s=step_s,
            step_time_s_band=(max(0.0, step_s - error_s), step_s + error_s),
            error_ratio=error_s / step_s,
            unseen=self._unseen(self.jobs[place]),
        )

    def _ran_whole(self, candidate: TrainDecision) -> bool:
        return any(one.job.candidate == candidate and one.job.scale is None for one in self.seen)

    def _unseen(self, job: Job) -> tuple[str, ...]:
        """Say what of a whole job no trial has run, so that only the model speaks for it."""
        found = []
        share = job.parts_s_K[STATE] / job.predicted_s
        own = [one.job for one in self.seen if one.job.candidate == job.candidate]
        if not own:
            return ("any job of this decision, whole or smaller",)
        if job.sync not in {one.job.sync for one in self.seen} and share > 0.0:
            launched = max(own, key=lambda one: one.num_devices)
            found.append(
                f"gradient sums over {_sync_text(job.sync)}, {format_ratio(float(share))} of the"
                f" step (launched: over {_sync_text(launched.sync)})"
            )
        ranks = max(one.decision.pipeline_model_parallel_size for one in own)
        whole = job.decision.pipeline_model_parallel_size
        if ranks < whole:
            found.append(f"a pipeline of {whole} ranks ({ranks} were launched)")
        return tuple(found)

    def _place(self, candidate: TrainDecision) -> int | None:
        places = (place for place, one in enumerate(self.jobs) if one.candidate == candidate)
        return next(places, None)


def _sync_text(sync: Sync) -> str:
    dense, experts, is_far = sync
    apart = "" if dense == experts else f", of experts over {experts}"
    return f"{dense} ranks{apart}{' on several nodes' if is_far else ''}"


def estimates(possible: Possible, records: Sequence[TrialRecord]) -> Estimates:
    """Return what trials say of the whole jobs of their candidates."""
    seen = evidence_of(possible, records)
    tried = dict.fromkeys(one.job.candidate for one in seen)
    first = possible.around.plan.decision
    if tried and first is not None:
        tried.setdefault(first)
    jobs = tuple(possible.whole(candidate).job for candidate in tried)
    return Estimates(
        jobs=jobs, belief=believed(seen, jobs, band_ratio=possible.band_ratio), seen=seen
    )


def evidence_of(possible: Possible, records: Sequence[TrialRecord]) -> tuple[Seen, ...]:
    """Return the trials that ran as evidence about jobs, repeats joined."""
    found = []
    for record in pooled_by_scale(records):
        option = possible.option(record.decision, record.scale)
        if record.status == "ok" and option is not None:
            found.append(
                Seen(
                    job=option.job,
                    measured_s=measured_s(record),
                    noise_s=median_error_s(record.measured_steps_s),
                )
            )
    return tuple(found)


def pooled_by_scale(records: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Join the repeats of each whole job; smaller ones are never launched again."""
    whole = pooled([one for one in records if one.scale is None])
    return (*whole, *(one for one in records if one.scale is not None))
