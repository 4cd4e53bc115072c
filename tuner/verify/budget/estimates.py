"""Estimates of the full-scale jobs from all trials, full-scale or scaled down.

The plan's own choice is included even if no trial of it ran: other trials correct the model for it,
and a budget with room for slower candidates only must not make one of those the winner.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tuner.config.train import TrainDecision
from tuner.units import format_ratio
from tuner.verify.budget.extrapolation import Belief, MeasuredTrial, infer_belief
from tuner.verify.budget.jobs import STATE, Sync, TrialJob
from tuner.verify.budget.trial_options import TrialOptions
from tuner.verify.evidence import measured_s, median_error_s, pooled
from tuner.verify.records import Extrapolated, TrialRecord


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimates:
    """Step times of the candidates with a successful trial, and of the plan's own choice."""

    jobs: tuple[TrialJob, ...]
    """Full-scale jobs, in the order of their first trials."""
    belief: Belief
    seen: tuple[MeasuredTrial, ...]

    @property
    def best(self) -> TrainDecision | None:
        """The fastest; None if nothing ran."""
        if not self.jobs:
            return None
        return self.jobs[int(self.belief.mean_s_T.argmin())].candidate

    def step_s(self, candidate: TrainDecision) -> float | None:
        """Step time in seconds; None for an unknown candidate."""
        place = self._place(candidate)
        return None if place is None else float(self.belief.mean_s_T[place])

    def is_tie(self, one: TrainDecision, other: TrainDecision) -> bool:
        """Whether the order of two candidates is uncertain."""
        first, second = self._place(one), self._place(other)
        if first is None or second is None or first == second:
            return False
        return not self.belief.is_order_certain(first, second)

    def extrapolated(self, candidate: TrainDecision) -> Extrapolated | None:
        """Extrapolate the full-scale job of a candidate; None if it was launched itself."""
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

    def _unseen(self, job: TrialJob) -> tuple[str, ...]:
        """Name the parts of a full-scale job that no trial ran, where only the model applies."""
        unseen = []
        share = job.parts_s_K[STATE] / job.predicted_s
        own = [one.job for one in self.seen if one.job.candidate == job.candidate]
        if not own:
            return ("any job of this decision, at any scale",)
        if job.sync not in {one.job.sync for one in self.seen} and share > 0.0:
            launched = max(own, key=lambda one: one.num_devices)
            unseen.append(
                f"gradient reduction over {_sync_text(job.sync)}, {format_ratio(float(share))} of"
                f" the step (launched: over {_sync_text(launched.sync)})"
            )
        ranks = max(one.decision.pipeline_model_parallel_size for one in own)
        whole = job.decision.pipeline_model_parallel_size
        if ranks < whole:
            unseen.append(f"a pipeline of {whole} ranks ({ranks} were launched)")
        return tuple(unseen)

    def _place(self, candidate: TrainDecision) -> int | None:
        places = (place for place, one in enumerate(self.jobs) if one.candidate == candidate)
        return next(places, None)


def _sync_text(sync: Sync) -> str:
    dense, experts, is_far = sync
    expert_text = "" if dense == experts else f", of experts over {experts}"
    return f"{dense} ranks{expert_text}{' on several nodes' if is_far else ''}"


def estimates(possible: TrialOptions, records: Sequence[TrialRecord]) -> Estimates:
    """Estimate the full-scale jobs of the candidates from trials."""
    seen = trial_evidence(possible, records)
    tried = dict.fromkeys(one.job.candidate for one in seen)
    first = possible.space.plan.decision
    if tried and first is not None:
        tried.setdefault(first)
    jobs = tuple(possible.whole(candidate).job for candidate in tried)
    return Estimates(
        jobs=jobs, belief=infer_belief(seen, jobs, band_ratio=possible.band_ratio), seen=seen
    )


def trial_evidence(
    possible: TrialOptions, records: Sequence[TrialRecord]
) -> tuple[MeasuredTrial, ...]:
    """Return the successful trials as evidence about jobs, repeats merged."""
    evidence = []
    for record in pooled_by_scale(records):
        option = possible.option(record.decision, record.scale)
        if record.status == "ok" and option is not None:
            evidence.append(
                MeasuredTrial(
                    job=option.job,
                    measured_s=measured_s(record),
                    noise_s=median_error_s(record.measured_steps_s),
                )
            )
    return tuple(evidence)


def pooled_by_scale(records: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Merge the repeats of each full-scale job; scaled-down ones are never repeated."""
    whole = pooled([one for one in records if one.scale is None])
    return (*whole, *(one for one in records if one.scale is not None))
