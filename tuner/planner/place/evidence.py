"""What is planned from and what is judged on: the passes of each recorded workload.

    W workloads   P passes   L layers   E experts

The first passes are planned from, the last `judge_ratio` of them judged on, so that a gain is what
a plan brings on tokens it has not seen. The token copies of a recording of one pass (totals) are
split at random instead, each expert's by a binomial draw: what a plan makes of the accidents of few
tokens then brings nothing on the others. That later tokens may differ, it does not show, and the
plan says so. Sampled tokens are parted the same way, in order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from profilers.routing.recording import Recording
from solvers.placement.ranks import Floats, Ints
from tuner.spec.place_read import PlaceSpec

PARTS: Final = 8
"""Of the passes that are planned from."""
PART_PASSES: Final = 2
"""At least."""
STRETCHES: Final = 64
"""Of which deviations are kept, at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkloadEvidence:
    """One workload: token copies of a pass over all ranks."""

    name: str
    weight_ratio: float
    planned_LE: Floats
    """Mean over the passes that are planned from."""
    judged_PLE: Floats
    """The passes that are judged on."""
    part_BLE: Floats | None
    """Means of parts of those planned from, in order; None where they are too few."""
    variance_LE: Floats
    """Of the mean of the judged passes around `planned_LE`; see `load_variance`."""
    scatter_BLE: Floats | None
    """What stretches of the planned passes differ by, put to that variance; None: too few."""
    whole_PLE: Floats
    """All passes, for a plan that was made without this workload."""
    planned_passes: int
    is_split: bool
    """Judged on other passes than planned from."""
    is_counted: bool
    """Judged passes are as recorded, not scaled to another size."""
    recorded_ratio: float
    """Token copies recorded over those judged, for the noise of counting."""
    passes_left_out: int
    """In which some layer saw no token."""
    recording: Recording
    planned_LTK: Ints | None = None
    """Sampled tokens that are planned from; None where none were kept."""
    judged_LTK: Ints | None = None
    """Those that are judged on."""

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
    known = [one.top_k for one in spec.recordings.values()]
    if spec.model is not None and spec.model.moe is not None:
        known.append(spec.model.moe.top_k)
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
    # A pass in which a layer saw nothing says nothing about its balance.
    counted_PLE = counted_PLE[(counted_PLE.sum(axis=2) > 0).all(axis=1)]
    if not len(counted_PLE):
        counted_PLE = recording.count_LE[None]
    passes = len(counted_PLE)
    is_split = passes >= 2
    if is_split:
        judged = min(passes - 1, max(1, round(judge_ratio * passes)))
        planned_PLE, judged_PLE = counted_PLE[:-judged], counted_PLE[-judged:]
    else:
        planned_PLE, judged_PLE = _parted(counted_PLE, judge_ratio=judge_ratio)
    size = copies_per_pass or _copies_per_pass(counted_PLE)
    planned_LTK, judged_LTK = _parted_tokens(recording, judge_ratio=judge_ratio)
    scale = size / _copies_per_pass(judged_PLE if not is_split else counted_PLE)
    variance_LE = load_variance(planned_PLE, judged_copies=judged_PLE.sum(axis=(0, 2)), size=size)
    return WorkloadEvidence(
        name=name,
        weight_ratio=weight_ratio,
        planned_LE=planned_PLE.mean(axis=0) * (size / _copies_per_pass(planned_PLE)),
        judged_PLE=judged_PLE.astype(np.float64) * scale,
        part_BLE=_parts(planned_PLE, size=size) if is_split else None,
        variance_LE=variance_LE,
        scatter_BLE=load_scatter(planned_PLE, variance_LE=variance_LE),
        whole_PLE=counted_PLE.astype(np.float64) * (size / _copies_per_pass(counted_PLE)),
        planned_passes=len(planned_PLE),
        is_split=is_split,
        is_counted=is_split and copies_per_pass is None,
        recorded_ratio=1.0 / scale,
        passes_left_out=recording.num_passes - passes,
        recording=recording,
        planned_LTK=planned_LTK,
        judged_LTK=judged_LTK,
    )


def _parts(planned_PLE: Ints, *, size: float) -> Floats | None:
    """Return means of equal parts of the passes, each as long as the mean of all."""
    if len(planned_PLE) < PARTS * PART_PASSES:
        return None
    means = [part.mean(axis=0) for part in np.array_split(planned_PLE, PARTS)]
    return np.stack([mean * (size / float(mean.sum(axis=1).mean())) for mean in means])


def load_variance(planned_PLE: Ints, *, judged_copies: Ints, size: float) -> Floats:
    """Return how far loads of other passes scatter around the mean of those planned from, [L][E].

    Token copies of one text choose alike, so that an expert's count of n varies by `dispersion` * n
    and not by n. Both means are of so many counts:

        variance = dispersion * share * size^2 * (1 / planned copies + 1 / judged copies)

    The dispersion of a layer is what stretches of the planned passes differ by, over what counting
    alone makes of them, and never less than 1: all that is known of a single pass. A lasting change
    between the passes planned from and later ones is not in it.

    Args:
        planned_PLE: counts of the passes that are planned from.
        judged_copies: of each layer, over all judged passes.
        size: copies of a layer in the pass that loads are stated for.
    """
    copies_L = planned_PLE.sum(axis=(0, 2)).astype(np.float64)
    share_LE = planned_PLE.sum(axis=0) / copies_L[:, None]
    dispersion_L = np.ones(len(copies_L))
    stretches = min(PARTS, len(planned_PLE))
    if stretches > 1:
        count_BLE = np.stack(
            [part.sum(axis=0) for part in np.array_split(planned_PLE, stretches)]
        ).astype(np.float64)
        expected_BLE = count_BLE.sum(axis=2, keepdims=True) * share_LE
        square_L = np.square(count_BLE - expected_BLE).sum(axis=(0, 2))
        counting_L = (expected_BLE * (1.0 - share_LE)).sum(axis=(0, 2)) * (1.0 - 1.0 / stretches)
        dispersion_L = np.maximum(square_L / np.maximum(counting_L, 1e-300), 1.0)
    known_L = dispersion_L * (1.0 / copies_L + 1.0 / judged_copies)
    return np.asarray(share_LE * known_L[:, None] * size**2)


def load_scatter(planned_PLE: Ints, *, variance_LE: Floats) -> Floats | None:
    """Return how loads of other passes differ from the mean together, [B][L][E]; None: too few.

    Experts of one subject rise and fall together, and some scatter far more than others: the
    deviations of stretches of the passes, which `load_variance` only adds up. Put to its sum over
    the experts of a layer, of which it knows how stretches of more passes scatter.
    """
    if len(planned_PLE) < PARTS * PART_PASSES:
        return None
    stretches = np.array_split(planned_PLE, min(STRETCHES, len(planned_PLE)))
    count_BLE = np.stack([one.sum(axis=0) for one in stretches]).astype(np.float64)
    share_LE = planned_PLE.sum(axis=0) / planned_PLE.sum(axis=(0, 2))[:, None]
    change_BLE = count_BLE - count_BLE.sum(axis=2, keepdims=True) * share_LE
    square_L = np.maximum(np.square(change_BLE).sum(axis=(0, 2)), 1e-300)
    return np.asarray(change_BLE * np.sqrt(variance_LE.sum(axis=1) / square_L)[:, None])


def _copies_per_pass(count_PLE: Ints) -> float:
    """Token copies of one layer in one pass, on average."""
    return float(count_PLE.sum(axis=2).mean())


def _parted(count_PLE: Ints, *, judge_ratio: float) -> tuple[Ints, Ints]:
    """Split token copies at random; not at all where a layer has too few for both."""
    judged_PLE = np.random.default_rng(0).binomial(count_PLE, judge_ratio)
    planned_PLE = count_PLE - judged_PLE
    if any((part.sum(axis=2) == 0).any() for part in (planned_PLE, judged_PLE)):
        return count_PLE, count_PLE
    return planned_PLE, judged_PLE


def _parted_tokens(
    recording: Recording, *, judge_ratio: float
) -> tuple[Ints, Ints] | tuple[None, None]:
    if recording.token_LTK is None:
        return None, None
    tokens_LTK = recording.token_LTK.astype(np.int64)
    tokens = tokens_LTK.shape[1]
    if tokens < 2:
        return tokens_LTK, tokens_LTK
    judged = min(tokens - 1, max(1, round(judge_ratio * tokens)))
    return tokens_LTK[:, :-judged], tokens_LTK[:, -judged:]


def load_WLE(evidence: Sequence[WorkloadEvidence]) -> Floats:
    """Stack what is planned from."""
    return np.stack([one.planned_LE for one in evidence])


def variance_WLE(evidence: Sequence[WorkloadEvidence]) -> Floats:
    """Stack how far loads of other passes scatter around what is planned from."""
    return np.stack([one.variance_LE for one in evidence])


def scatter_BWLE(evidence: Sequence[WorkloadEvidence]) -> Floats | None:
    """Stack what loads of other passes differ by; None where a workload's is not known."""
    found = [one.scatter_BLE for one in evidence if one.scatter_BLE is not None]
    if len(found) < len(evidence):
        return None
    most = max(len(one_BLE) for one_BLE in found)
    padded = [np.pad(one, ((0, most - len(one)), (0, 0), (0, 0))) for one in found]
    return np.stack(padded, axis=1)


def part_BWLE(evidence: Sequence[WorkloadEvidence]) -> Floats | None:
    """Stack the parts of the passes that are planned from; None where a workload has none."""
    parts = [one.part_BLE for one in evidence if one.part_BLE is not None]
    return np.stack(parts, axis=1) if len(parts) == len(evidence) else None


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
