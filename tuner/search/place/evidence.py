"""Fit passes and hold-out passes of each recorded workload: the one split of a plan's evidence.

    W workloads   P passes   L layers   E experts   T sampled tokens   K experts of a token
    M = L - 1 pairs of consecutive recorded layers

The last `judge_ratio` of the passes are held out, so that gains are measured on tokens that the
plan was not made from. A recording of one pass (totals) is split at random instead (binomial per
expert), so that overfitting to sampling noise shows no gain; a drift of later tokens does not show,
and the plan says so. Sampled tokens are in the order of passes and split likewise; every pair of a
token's choices counts one. A recording that keeps only sums of transitions over all passes is
evaluated on what was planned from.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np

from profilers.routing.recording import Recording
from solvers.placement.ranks import Floats, Ints
from tuner.errors import SpecError
from tuner.spec.place_spec import PlaceSpec

_RECORD_TOKENS: Final = "record tokens: SGLang's recorder in mode per_token, or Megatron's trace"


class Split(StrEnum):
    """Part of the evidence."""

    FIT = "fit"
    HOLDOUT = "holdout"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkloadEvidence:
    """One workload, split into fit and hold-out passes: token copies of a pass over all ranks."""

    name: str
    weight_ratio: float
    fit_LE: Floats
    """Mean over the fit passes."""
    fit_PLE: Floats
    """The fit passes; their mean where one pass was split at random."""
    holdout_PLE: Floats
    """The hold-out passes."""
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
    fit_LTK: Ints | None
    """Sampled tokens to fit on; None where none were kept."""
    holdout_LTK: Ints | None
    """Sampled tokens held out."""

    def load_PLE(self, split: Split) -> Floats:
        """Return the passes of a part."""
        if split is Split.ALL:
            return np.concatenate([self.fit_PLE, self.holdout_PLE])
        return self.fit_PLE if split is Split.FIT else self.holdout_PLE

    def token_LTK(self, split: Split) -> Ints:
        """Return the chosen experts of the sampled tokens of a part.

        Raises:
            SpecError: the recording holds none.
        """
        kept_LTK = self.fit_LTK if split is Split.FIT else self.holdout_LTK
        whole_LTK = self.recording.token_LTK
        if kept_LTK is None or whole_LTK is None:
            raise SpecError(
                f"goal.workloads: {self.name!r} holds no sampled tokens, which objective"
                f" co_activation is about; {_RECORD_TOKENS}"
            )
        return whole_LTK.astype(np.int64) if split is Split.ALL else kept_LTK

    @property
    def has_holdout_transitions(self) -> bool:
        """Return whether there are hold-out tokens for transitions."""
        token_LTK = self.recording.token_LTK
        return token_LTK is not None and token_LTK.shape[1] > 1

    def flow_MEE(self, split: Split) -> Floats:
        """Return the transitions of a part, each pair of layers as shares of its token copies.

        Raises:
            SpecError: the recording holds neither transitions nor sampled tokens.
        """
        recorded_MEE = self.recording.transition_MEE
        if self.has_holdout_transitions and (split is not Split.ALL or recorded_MEE is None):
            return transitions_MEE(self.token_LTK(split), self.recording.num_experts)
        if recorded_MEE is None:
            raise SpecError(
                f"goal.workloads: {self.name!r} holds no transitions between layers, which"
                f" objective layer_chain is about; {_RECORD_TOKENS}"
            )
        return _shares_MEE(recorded_MEE)


def transitions_MEE(token_LTK: Ints, num_experts: int) -> Floats:
    """Return the pairs of choices of tokens in consecutive layers, as shares of each pair's sum."""
    flow = np.zeros((len(token_LTK) - 1, num_experts, num_experts))
    for pair_EE, here_TK, there_TK in zip(flow, token_LTK[:-1], token_LTK[1:], strict=True):
        cell = here_TK[:, :, None] * num_experts + there_TK[:, None, :]
        pair_EE += np.bincount(cell.ravel(), minlength=num_experts**2).reshape(pair_EE.shape)
    return _shares_MEE(flow)


def _shares_MEE(flow: Floats) -> Floats:
    return np.asarray(flow / np.maximum(flow.sum(axis=(1, 2), keepdims=True), 1.0))


def split_recordings(spec: PlaceSpec) -> tuple[WorkloadEvidence, ...]:
    """Split every recording of a spec, scaled to the planned size of a pass."""
    goal = spec.goal
    total = math.fsum(workload.weight for workload in goal.workloads)
    known: list[float | None] = [recording.top_k for recording in spec.recordings.values()]
    if spec.model is not None and spec.model.moe is not None:
        # Recordings count the copies for experts with weights.
        known.insert(0, spec.model.moe.computed_top_k)
    top_k = next((count for count in known if count is not None), None)
    copies = None
    if goal.tokens_per_pass is not None and top_k is not None:
        copies = float(goal.tokens_per_pass * top_k)
    return tuple(
        _split(
            spec.recordings[workload.name],
            name=workload.name,
            weight_ratio=workload.weight / total,
            judge_ratio=goal.judge_ratio,
            copies_per_pass=copies,
        )
        for workload in goal.workloads
    )


def _split(
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
        first = passes - _num_held_out(passes, judge_ratio)
        fit_PLE, holdout_PLE = counted_PLE[:first], counted_PLE[first:]
    else:
        fit_PLE, holdout_PLE = _split_copies(counted_PLE, judge_ratio=judge_ratio)
    size = copies_per_pass or _copies_per_pass(counted_PLE)
    scale = size / _copies_per_pass(counted_PLE if is_split else holdout_PLE)
    fit_LE = fit_PLE.mean(axis=0) * (size / _copies_per_pass(fit_PLE))
    fit_LTK = holdout_LTK = None
    if recording.token_LTK is not None:
        token_LTK = recording.token_LTK.astype(np.int64)
        # A single token is both.
        at = token_LTK.shape[1] - max(1, _num_held_out(token_LTK.shape[1], judge_ratio))
        fit_LTK, holdout_LTK = token_LTK[:, : max(at, 1)], token_LTK[:, at:]
    return WorkloadEvidence(
        name=name,
        weight_ratio=weight_ratio,
        fit_LE=fit_LE,
        fit_PLE=fit_PLE.astype(np.float64) * scale if is_split else fit_LE[None],
        holdout_PLE=holdout_PLE.astype(np.float64) * scale,
        num_fit_passes=len(fit_PLE),
        is_split=is_split,
        is_counted=is_split and copies_per_pass is None,
        recorded_ratio=1.0 / scale,
        passes_left_out=recording.num_passes - passes,
        recording=recording,
        fit_LTK=fit_LTK,
        holdout_LTK=holdout_LTK,
    )


def _num_held_out(count: int, ratio: float) -> int:
    return min(count - 1, max(1, round(ratio * count)))


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


def spread_passes(load_PLE: Floats, most_passes: int) -> Floats:
    """Return at most so many passes, evenly spaced."""
    taken = np.linspace(0, len(load_PLE) - 1, min(most_passes, len(load_PLE)))
    return load_PLE[taken.round().astype(np.int64)]


def limit_passes(workload: WorkloadEvidence, most_passes: int) -> WorkloadEvidence:
    """Keep at most so many passes of each part; one held out does not show how passes differ."""
    return replace(
        workload,
        fit_PLE=spread_passes(workload.fit_PLE, max(1, most_passes)),
        holdout_PLE=spread_passes(workload.holdout_PLE, max(2, most_passes)),
    )


def weight_W(evidence: Sequence[WorkloadEvidence]) -> Floats:
    """Weights of some of the workloads, summing to 1."""
    weights = np.array([workload.weight_ratio for workload in evidence])
    return np.asarray(weights / weights.sum())


def mean_load_LE(evidence: Sequence[WorkloadEvidence]) -> Floats:
    """Return the mean load that EPLB is given: workloads by weight, scaled to equal totals.

    Totals are equal per layer, since recordings differ in length.
    """
    shares = [workload.fit_LE / workload.fit_LE.sum(axis=1, keepdims=True) for workload in evidence]
    return np.asarray(np.einsum("w,wle->le", weight_W(evidence), np.stack(shares)))
