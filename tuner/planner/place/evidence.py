"""What is planned from and what is judged on: the passes of each recorded workload.

    W workloads   P passes   L layers   E experts

The first passes are planned from, the last `judge_ratio` of them judged on, so that a gain is what
a plan brings on tokens it has not seen. A recording of one pass (totals) serves for both, and the
plan says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profilers.routing.recording import Recording
from solvers.placement.ranks import Floats
from tuner.spec.place_read import PlaceSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkloadEvidence:
    """One workload: token copies of a pass over all ranks."""

    name: str
    weight_ratio: float
    planned_LE: Floats
    """Mean over the passes that are planned from."""
    judged_PLE: Floats
    """The passes that are judged on."""
    whole_PLE: Floats
    """All passes, for a plan that was made without this workload."""
    planned_passes: int
    is_split: bool
    """Judged on other passes than planned from."""
    recording: Recording

    @property
    def typical_pass_LE(self) -> Floats:
        """The judged pass of median size."""
        order = np.argsort(self.judged_PLE.sum(axis=(1, 2)), kind="stable")
        return np.asarray(self.judged_PLE[order[len(order) // 2]])

    @property
    def judged_passes(self) -> int:
        """Passes judged on that were not planned from."""
        return len(self.judged_PLE) if self.is_split else 0


def evidence_of(spec: PlaceSpec) -> tuple[WorkloadEvidence, ...]:
    """Split every recording of a spec, scaled to the pass that is planned."""
    goal = spec.goal
    total = math.fsum(workload.weight for workload in goal.workloads)
    return tuple(
        _of_recording(
            spec.recordings[workload.name],
            name=workload.name,
            weight_ratio=workload.weight / total,
            judge_ratio=goal.judge_ratio,
            tokens=goal.tokens_per_pass,
        )
        for workload in goal.workloads
    )


def _of_recording(
    recording: Recording,
    *,
    name: str,
    weight_ratio: float,
    judge_ratio: float,
    tokens: int | None,
) -> WorkloadEvidence:
    whole_PLE = recording.count_PLE.astype(np.float64)
    # A pass in which a layer saw nothing says nothing about its balance.
    whole_PLE = whole_PLE[(whole_PLE.sum(axis=2) > 0.0).all(axis=1)]
    if not len(whole_PLE):
        whole_PLE = recording.count_LE.astype(np.float64)[None]
    if tokens is not None and recording.top_k is not None:
        mean = whole_PLE.sum(axis=2).mean()
        whole_PLE *= tokens * recording.top_k / mean
    passes = len(whole_PLE)
    is_split = passes >= 2
    judged = min(passes - 1, max(1, round(judge_ratio * passes))) if is_split else 1
    planned_PLE = whole_PLE[: passes - judged] if is_split else whole_PLE
    planned_LE = planned_PLE.mean(axis=0)
    if (planned_LE.sum(axis=1) <= 0.0).any():
        planned_LE = whole_PLE.mean(axis=0)
    return WorkloadEvidence(
        name=name,
        weight_ratio=weight_ratio,
        planned_LE=planned_LE,
        judged_PLE=whole_PLE[passes - judged :],
        whole_PLE=whole_PLE,
        planned_passes=len(planned_PLE),
        is_split=is_split,
        recording=recording,
    )


def load_WLE(evidence: Sequence[WorkloadEvidence]) -> Floats:
    """Stack what is planned from."""
    return np.stack([one.planned_LE for one in evidence])


def weight_W(evidence: Sequence[WorkloadEvidence]) -> Floats:
    """Weights of some of the workloads, summing to 1."""
    weights = np.array([one.weight_ratio for one in evidence])
    return np.asarray(weights / weights.sum())


def mean_load_LE(evidence: Sequence[WorkloadEvidence]) -> Floats:
    """Return the mean load that EPLB's rule is given: every workload by its weight, of equal size.

    Workloads are put to equal totals in each layer first, since recordings differ in length.
    """
    loads = load_WLE(evidence)
    shares = loads / loads.sum(axis=2, keepdims=True)
    return np.asarray(np.einsum("w,wle->le", weight_W(evidence), shares))
