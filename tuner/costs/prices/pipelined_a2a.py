"""A MoE layer cut into r pieces, so that network, node links and GEMMs overlap.

Every piece passes through dispatch (all-to-all), all-gather of expert-tensor ranks, experts,
reduce-scatter and combine (all-to-all). Three resources work in parallel: the network between nodes
(A, twice a piece), the links inside a node (G and S), the matrix units (X). One piece of r takes

    t(r) = alpha + (work / r) for each of A, G, S, X

and the layer takes as long as the bottleneck of the three, plus what surrounds it:

    2  experts      2 A + G + S + r X
    3  network      2 r A + G + S
    4  node links   2 A + r (G + S)

Source: FSMoE, arXiv 2501.10714, equation 1 and its cases 2 to 4. The paper's conditions Q1 to Q7
name the largest (Q1 compares A with G, which says the same where G = S), so the largest is taken.
Against a replay of the three streams the largest is exact in cases 2 and 4; in case 3 it is too
long by G + S at most, since dispatches of later pieces already fill that gap. Its case 1 lets
gradient reduction share the network; no engine cuts that by layers, and what they do cut, buckets,
is priced in tuner/costs/train/gradient_buckets.py.

Each case is convex in r, so their largest is; its integer minimum lies beside a stationary point
of one case or a crossing of two, and those are what `best_degree` tries. Backward passes have their
own r: their GEMMs take twice as long.

Which engines launch r > 1: none of the targets (Megatron-LM, Megatron-Bridge, torchtitan and
DeepSpeed overlap between layers or micro-batches, if at all); Tutel's `a2a_ffn_overlap_degree` is
such a degree without gather and scatter. A plan states the gain but cannot choose it.

Letters: C columns, N candidate degrees. Not covered: memory of more pieces, kernels that slow each
other down, GEMMs too small to be efficient beyond their start-up.
"""

from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Numbers
from tuner.costs.train.shapes import Grid

MOST_PIECES: Final = 64
"""Above this a piece holds too few tokens for its start-up costs to be known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelinedPart:
    """One of the layer's parts: seconds to start and seconds for the whole layer's work."""

    start_s: Numbers
    work_s: Numbers

    def piece_s(self, pieces: Numbers) -> Numbers:
        """Seconds of one piece of so many."""
        return self.start_s + self.work_s / pieces


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelinedLayer:
    """The parts of one pass through a MoE layer."""

    all_to_all: PipelinedPart
    """One all-to-all between nodes; there are two."""
    gather: PipelinedPart
    scatter: PipelinedPart
    experts: PipelinedPart


def case_times_s(layer: PipelinedLayer, *, pieces: Numbers) -> Grid:
    """Seconds by case 2 to 4, [3, ...]."""
    all_to_all_s = layer.all_to_all.piece_s(pieces)
    inside_s = layer.gather.piece_s(pieces) + layer.scatter.piece_s(pieces)
    experts_s = layer.experts.piece_s(pieces)
    cases = (
        2.0 * all_to_all_s + inside_s + pieces * experts_s,
        2.0 * pieces * all_to_all_s + inside_s,
        2.0 * all_to_all_s + pieces * inside_s,
    )
    return np.stack(np.broadcast_arrays(*(np.atleast_1d(case) for case in cases)))


def overlapped_moe_s(layer: PipelinedLayer, *, pieces: Numbers) -> npt.NDArray[np.float64]:
    """Seconds of the layer in so many pieces; the plain sum of its parts for one piece."""
    times: npt.NDArray[np.float64] = case_times_s(layer, pieces=pieces).max(axis=0)
    return times


def best_degree(
    layer: PipelinedLayer, *, most: int = MOST_PIECES
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the r in 1 .. most of least time and that time, per column; the smaller on ties."""
    at_NC = np.stack(np.broadcast_arrays(*_turning_points(layer)))
    at_NC = np.nan_to_num(at_NC, nan=1.0, posinf=most, neginf=1.0)
    candidates_NC = np.concatenate([np.ones_like(at_NC[:1]), np.floor(at_NC), np.ceil(at_NC)])
    candidates_NC = np.sort(np.clip(candidates_NC, 1, most), axis=0)
    times_NC = overlapped_moe_s(layer, pieces=candidates_NC)
    first_C = times_NC.argmin(axis=0)[None]
    pieces_C = np.take_along_axis(candidates_NC, first_C, axis=0)[0].astype(np.int64)
    return pieces_C, np.take_along_axis(times_NC, first_C, axis=0)[0]


def _turning_points(layer: PipelinedLayer) -> list[npt.NDArray[np.float64]]:
    """Every r > 0, not rounded, at which the largest case can stop falling.

    With case k written as c_k + a_k r + b_k / r: its own minimum sqrt(b_k / a_k), and the roots of
    (a_j - a_k) r^2 + (c_j - c_k) r + (b_j - b_k) = 0.
    """
    cases = _coefficients(layer)
    with np.errstate(divide="ignore", invalid="ignore"):
        points = [np.sqrt(falling / rising) for _, rising, falling in cases]
        for (c_j, a_j, b_j), (c_k, a_k, b_k) in combinations(cases, 2):
            a, b, c = a_j - a_k, c_j - c_k, b_j - b_k
            root = np.sqrt(b * b - 4.0 * a * c)
            # Without subtracting nearly equal numbers, and with a = 0 allowed.
            far = -0.5 * (b + np.copysign(root, b))
            points += [far / a, c / far]
    return [np.atleast_1d(point) for point in points]


def _coefficients(
    layer: PipelinedLayer,
) -> list[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
    """Each case as constant, factor of r, factor of 1 / r."""
    all_to_all, experts = layer.all_to_all, layer.experts
    start_s = np.asarray(layer.gather.start_s + layer.scatter.start_s, dtype=np.float64)
    work_s = np.asarray(layer.gather.work_s + layer.scatter.work_s, dtype=np.float64)
    twice_start_s = np.asarray(2.0 * all_to_all.start_s, dtype=np.float64)
    twice_work_s = np.asarray(2.0 * all_to_all.work_s, dtype=np.float64)
    return [
        (
            twice_start_s + start_s + experts.work_s,
            np.asarray(experts.start_s, dtype=np.float64),
            twice_work_s + work_s,
        ),
        (twice_work_s + start_s, twice_start_s, work_s),
        (twice_start_s + work_s, start_s, twice_work_s),
    ]
