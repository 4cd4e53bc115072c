"""Extrapolates trials to jobs that were not launched: step times and their covariance.

Every job's true step is the predicted one, part by part, under unknown factors:

    t = sum_k  part_k (1 + c + f_k + [k = state] g_sync) + predicted (d_candidate + j_job + w(x))

    c        common to all                              standard deviation 1: nearly free
    f_k      of one part, common to all jobs            0.3: factors differ by about 30 %
    g_sync   of gradient reduction over one replica set the model's band: reductions over more
             replicas are other collectives than those that were measured
    d        of one candidate at every scale            0.05 s
    j        of one job                                 0.05 s
    w(x)     of size, x = log2 of the full-scale step over the job's: 0.05 s sqrt(x), a random walk
             away from full scale, common to all candidates: caches, memory and switches behave
             differently in smaller jobs, the more so the smaller they are

0.3 and 0.05 are the priors of tuner/verify/recalibration.py; predictions are first scaled by the
median ratio of the trials. s scales the unexplained terms: it is averaged over 1/4, 1/2, 1, 2, 4,
each weighted by its likelihood and a log-normal prior around 1 (standard deviation: a factor of
two). All else is normal, so beliefs about full-scale jobs and their covariances follow in closed
form (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, eq. 2.25, 5.8), and two
layer counts separate layers from embedding and LM head because their shares differ.

A trial of the full-scale job leaves only the noise of its steps. Reported errors are 90 % bands
under these priors.

The plan's own choice is estimated even if no trial of it ran: other trials correct the model for
it, and a budget with room for slower candidates only must not make one of those the winner.

Letters: A known jobs, T target jobs, K parts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.arrays import Floats
from tuner.config.train import TrainDecision
from tuner.units import format_ratio
from tuner.verify.budget.trial_options import STATE, Sync, TrialJob, TrialOptions
from tuner.verify.evidence import measured_s, median_error_s, pooled
from tuner.verify.records import Extrapolated, TrialRecord

COMMON: Final = 1.0
PART: Final = 0.3
CANDIDATE: Final = 0.05
JOB: Final = 0.05
SIZE: Final = 0.05
"""Per square root of a halving; our estimate."""

SPREADS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
SPREAD_PRIOR: Final = math.log(2.0)

NINE_OF_TEN: Final = 1.645
"""Standard deviations of the normal distribution."""

LEAST_NOISE: Final = 0.002
"""Least relative noise of a step, for clocks and warm-up."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredTrial:
    """A successful trial."""

    job: TrialJob
    measured_s: float
    noise_s: float
    """Standard error."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Belief:
    """Step times of jobs in seconds, jointly normal."""

    mean_s_T: Floats
    covariance_TT: Floats

    @classmethod
    def of_nothing(cls) -> "Belief":
        """The belief about no job."""
        return cls(mean_s_T=np.zeros(0), covariance_TT=np.zeros((0, 0)))

    def error_s(self, place: int) -> float:
        """Half-width of a job's 90 % band, in seconds."""
        return NINE_OF_TEN * math.sqrt(max(0.0, float(self.covariance_TT[place, place])))

    def is_order_certain(self, one: int, other: int) -> bool:
        """Whether the order of two jobs is certain at the 90 % level."""
        both = self.covariance_TT[np.ix_([one, other], [one, other])]
        deviation = math.sqrt(max(0.0, float(both[0, 0] + both[1, 1] - 2.0 * both[0, 1])))
        return bool(abs(self.mean_s_T[one] - self.mean_s_T[other]) > NINE_OF_TEN * deviation)


def infer_belief(
    seen: Sequence[MeasuredTrial], jobs: Sequence[TrialJob], *, band_ratio: float
) -> Belief:
    """Infer the belief about jobs from trials.

    Args:
        seen: successful trials.
        jobs: the target jobs; launched ones may be among them.
        band_ratio: half-width of the model's 90 % band.
    """
    if not jobs:
        return Belief.of_nothing()
    if not seen:
        mean = np.array([one.predicted_s for one in jobs])
        return Belief(mean_s_T=mean, covariance_TT=_covariance(jobs, jobs, 1.0, 1.0, band_ratio))
    known = [one.job for one in seen]
    measured = np.array([one.measured_s for one in seen])
    noise = np.array([max(one.noise_s, LEAST_NOISE * one.measured_s) for one in seen])
    common = float(np.median([one.measured_s / one.job.predicted_s for one in seen]))
    prior_A = common * np.array([one.predicted_s for one in known])
    prior_T = common * np.array([one.predicted_s for one in jobs])
    beliefs, weights = [], []
    for spread in SPREADS:
        known_AA = _covariance(known, known, common, spread, band_ratio) + np.diag(noise**2)
        target_TA = _covariance(jobs, known, common, spread, band_ratio)
        target_TT = _covariance(jobs, jobs, common, spread, band_ratio)
        solved = np.linalg.solve(known_AA, np.column_stack((measured - prior_A, target_TA.T)))
        beliefs.append((prior_T + target_TA @ solved[:, 0], target_TT - target_TA @ solved[:, 1:]))
        _, log_size = np.linalg.slogdet(known_AA)
        misfit = (measured - prior_A) @ solved[:, 0]
        weights.append(-0.5 * (misfit + log_size + (math.log(spread) / SPREAD_PRIOR) ** 2))
    return _mixed(beliefs, np.exp(np.array(weights) - max(weights)))


def _covariance(
    ones: Sequence[TrialJob],
    others: Sequence[TrialJob],
    common: float,
    spread: float,
    band_ratio: float,
) -> Floats:
    """Return the prior covariance of true steps."""
    both = (ones, others)
    one_AK = np.stack([job.parts_s_K for job in ones])
    other_BK = np.stack([job.parts_s_K for job in others])
    total_AB = np.outer(one_AK.sum(axis=1), other_BK.sum(axis=1))
    state_AB = np.outer(one_AK[:, STATE], other_BK[:, STATE])
    sync = max(PART, band_ratio / NINE_OF_TEN)
    same_sync = _same([job.sync for job in ones], [job.sync for job in others])
    same_candidate = _same([job.candidate for job in ones], [job.candidate for job in others])
    same_job = same_candidate * _same([job.scale for job in ones], [job.scale for job in others])
    own = CANDIDATE**2 * same_candidate + JOB**2 * same_job
    own += SIZE**2 * np.minimum.outer(*(np.array([job.halvings for job in k]) for k in both))
    covariance_AB: Floats = common**2 * (
        (COMMON**2 + spread**2 * own) * total_AB
        + PART**2 * one_AK @ other_BK.T
        + sync**2 * same_sync * state_AB
    )
    return covariance_AB


def _same(ones: Sequence[object], others: Sequence[object]) -> Floats:
    codes: dict[object, int] = {}
    first = np.array([codes.setdefault(one, len(codes)) for one in ones])
    second = np.array([codes.setdefault(one, len(codes)) for one in others])
    equal: Floats = (first[:, None] == second[None, :]).astype(np.float64)
    return equal


def _mixed(beliefs: Sequence[tuple[Floats, Floats]], weights: Floats) -> Belief:
    """Mix beliefs into one with the mixture's mean and covariance."""
    shares = weights / weights.sum()
    mean = sum((share * one for share, (one, _) in zip(shares, beliefs, strict=True)), start=0.0)
    covariance = sum(
        (
            share * (inside + np.outer(one - mean, one - mean))
            for share, (one, inside) in zip(shares, beliefs, strict=True)
        ),
        start=0.0,
    )
    return Belief(mean_s_T=np.asarray(mean), covariance_TT=np.asarray(covariance))


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
