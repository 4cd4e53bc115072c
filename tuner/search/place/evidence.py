"""Fit passes and hold-out passes of each recorded workload.

    W workloads   P passes   L layers   E experts

The last `judge_ratio` of the passes are held out, so that gains are measured on tokens that the
plan was not made from. A recording of one pass (totals) is split at random instead (binomial per
expert), so that overfitting to sampling noise shows no gain; a drift of later tokens does not show,
and the plan says so. Sampled tokens are split in order, like passes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profilers.routing.recording import Recording
from solvers.placement.ranks import Floats, Ints
from tuner.spec.place_read import PlaceSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkloadEvidence:
    """One workload, split into fit and hold-out passes: token copies of a pass over all ranks."""

    name: str
    weight_ratio: float
    fit_LE: Floats
    """Mean over the fit passes."""
    holdout_PLE: Floats
    """The hold-out passes."""
    whole_PLE: Floats
    """All passes, for leave-one-out."""
    num_fit_passes: int
    is_split: bool
    """Fit and hold-out passes are different passes."""
    is_counted: bool
    """Hold-out passes are as recorded, not scaled to another size."""
    recorded_ratio: float
    """Token copies recorded over those of the hold-out passes, for counting noise."""
    passes_left_out: int
    """Passes in which some layer saw no token."""
    recording: Recording
    fit_LTK: Ints | None = None
    """Sampled tokens to fit on; None where none were kept."""
    holdout_LTK: Ints | None = None
    """Sampled tokens held out."""

    @property
    def fit_PLE(self) -> Floats:
        """The fit passes; their mean where one pass was split at random."""
        return self.whole_PLE[: self.num_fit_passes] if self.is_split else self.fit_LE[None]

    @property
    def typical_pass_LE(self) -> Floats:
        """The hold-out pass of median size."""
        order = np.argsort(self.holdout_PLE.sum(axis=(1, 2)), kind="stable")
        return np.asarray(self.holdout_PLE[order[len(order) // 2]])

    @property
    def num_holdout_passes(self) -> int:
        """Hold-out passes; 0 where one pass was split at random."""
        return len(self.holdout_PLE) if self.is_split else 0


def split_recordings(spec: PlaceSpec) -> tuple[WorkloadEvidence, ...]:
    """Split every recording of a spec, scaled to the planned size of a pass."""
    goal = spec.goal
    total = math.fsum(workload.weight for workload in goal.workloads)
    known: list[float | None] = [one.top_k for one in spec.recordings.values()]
    if spec.model is not None and spec.model.moe is not None:
        # Recordings count the copies for experts with weights.
        known.insert(0, spec.model.moe.computed_top_k)
    top_k = next((one for one in known if one is not None), None)
    copies = None
    if goal.tokens_per_pass is not None and top_k is not None:
        copies = float(goal.tokens_per_pass * top_k)
    return tuple(
        _of_recording(
            spec.recordings[workload.name],
            name=workload.name,
            weight_ratio=workload.weight / total,
            judge_ratio=goal.judge_ratio,
            copies_per_pass=copies,
        )
        for workload in goal.workloads
    )


def _of_recording(
    recording: Recording,
    *,
    name: str,
    weight_ratio: float,
    judge_ratio: float,
    copies_per_pass: float | None,
) -> WorkloadEvidence:
    counted_PLE: Ints = recording.count_PLE
    # A pass in which a layer saw no token carries no information on its balance.
    counted_PLE = counted_PLE[(counted_PLE.sum(axis=2) > 0).all(axis=1)]
    if not len(counted_PLE):
        counted_PLE = recording.count_LE[None]
    passes = len(counted_PLE)
    is_split = passes >= 2
    if is_split:
        num_holdout = min(passes - 1, max(1, round(judge_ratio * passes)))
        fit_PLE, holdout_PLE = counted_PLE[:-num_holdout], counted_PLE[-num_holdout:]
    else:
        fit_PLE, holdout_PLE = _split_copies(counted_PLE, judge_ratio=judge_ratio)
    size = copies_per_pass or _copies_per_pass(counted_PLE)
    fit_LTK, holdout_LTK = _split_tokens(recording, judge_ratio=judge_ratio)
    scale = size / _copies_per_pass(holdout_PLE if not is_split else counted_PLE)
    return WorkloadEvidence(
        name=name,
        weight_ratio=weight_ratio,
        fit_LE=fit_PLE.mean(axis=0) * (size / _copies_per_pass(fit_PLE)),
        holdout_PLE=holdout_PLE.astype(np.float64) * scale,
        whole_PLE=counted_PLE.astype(np.float64) * (size / _copies_per_pass(counted_PLE)),
        num_fit_passes=len(fit_PLE),
        is_split=is_split,
        is_counted=is_split and copies_per_pass is None,
        recorded_ratio=1.0 / scale,
        passes_left_out=recording.num_passes - passes,
        recording=recording,
        fit_LTK=fit_LTK,
        holdout_LTK=holdout_LTK,
    )


def _copies_per_pass(count_PLE: Ints) -> float:
    """Token copies of one layer in one pass, on average."""
    return float(count_PLE.sum(axis=2).mean())


def _split_copies(count_PLE: Ints, *, judge_ratio: float) -> tuple[Ints, Ints]:
    """Split token copies at random; use all for both where a layer has too few."""
    holdout_PLE = np.random.default_rng(0).binomial(count_PLE, judge_ratio)
    fit_PLE = count_PLE - holdout_PLE
    if any((part.sum(axis=2) == 0).any() for part in (fit_PLE, holdout_PLE)):
        return count_PLE, count_PLE
    return fit_PLE, holdout_PLE


def _split_tokens(
    recording: Recording, *, judge_ratio: float
) -> tuple[Ints, Ints] | tuple[None, None]:
    if recording.token_LTK is None:
        return None, None
    tokens_LTK = recording.token_LTK.astype(np.int64)
    tokens = tokens_LTK.shape[1]
    if tokens < 2:
        return tokens_LTK, tokens_LTK
    num_holdout = min(tokens - 1, max(1, round(judge_ratio * tokens)))
    return tokens_LTK[:, :-num_holdout], tokens_LTK[:, -num_holdout:]


def spread_passes(load_PLE: Floats, most: int) -> Floats:
    """Return at most so many passes, evenly spaced."""
    taken = np.linspace(0, len(load_PLE) - 1, min(most, len(load_PLE)))
    return load_PLE[taken.round().astype(np.int64)]


def load_WLE(evidence: Sequence[WorkloadEvidence]) -> Floats:
    """Stack the mean fit passes."""
    return np.stack([one.fit_LE for one in evidence])


def weight_W(evidence: Sequence[WorkloadEvidence]) -> Floats:
    """Weights of some of the workloads, summing to 1."""
    weights = np.array([one.weight_ratio for one in evidence])
    return np.asarray(weights / weights.sum())


def mean_load_LE(evidence: Sequence[WorkloadEvidence]) -> Floats:
    """Return the mean load that EPLB is given: workloads by weight, scaled to equal totals.

    Totals are equal per layer, since recordings differ in length.
    """
    loads = load_WLE(evidence)
    shares = loads / loads.sum(axis=2, keepdims=True)
    return np.asarray(np.einsum("w,wle->le", weight_W(evidence), shares))
