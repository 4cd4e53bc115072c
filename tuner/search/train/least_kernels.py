"""Kernels that no real ones beat, to bound a single imagined expert on a measured device.

A partial row is bounded with one expert in place of all (bounds.py). Measurements say little about
such shapes, and an extrapolated curve may be slower there than for real experts, so that the bound
would not hold. Here its GEMMs run at the device's peak, and GEMMs with a side of one element (those
of its router) are free. Everything else has the shapes of the real model.
"""

from dataclasses import dataclass

import numpy as np

from tuner.config.columns import Numbers
from tuner.costs.train.kernels import AttentionShape, ExpertSeconds, Kernels
from tuner.costs.train.measured_kernels import MeasuredKernels
from tuner.search.train.problem import TrainProblem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LowerBoundKernels:
    """Measured kernels, except for the experts and the router."""

    own: Kernels
    peak_flop_per_s: Numbers

    def gemm_s(self, m: Numbers, n: Numbers, k: Numbers, *, in_head: bool = False) -> Numbers:
        """One GEMM; free where a side is one element."""
        if np.all(np.minimum(np.minimum(m, n), k) <= 1.0):
            return 0.0
        return self.own.gemm_s(m, n, k, in_head=in_head)

    def experts_s(
        self, groups: Numbers, rows: Numbers, *, hidden: Numbers, width: Numbers, inner: Numbers
    ) -> ExpertSeconds:
        """Every operation at the peak: 2 rows hidden (inner + width) forward, twice that back."""
        forward_s = 2.0 * groups * rows * hidden * (inner + width) / self.peak_flop_per_s
        return ExpertSeconds(forward_s=forward_s, backward_s=2.0 * forward_s, weight_s=forward_s)

    def batched_gemm_s(self, batches: Numbers, m: Numbers, n: Numbers, k: Numbers) -> Numbers:
        """As measured."""
        return self.own.batched_gemm_s(batches, m, n, k)

    def attention_s(self, shape: AttentionShape) -> Numbers:
        """As measured."""
        return self.own.attention_s(shape)

    def attention_backward_s(self, shape: AttentionShape) -> Numbers:
        """As measured."""
        return self.own.attention_backward_s(shape)

    def memory_bound_s(self, moved_bytes: Numbers) -> Numbers:
        """As measured."""
        return self.own.memory_bound_s(moved_bytes)


def lower_bound_kernels(problem: TrainProblem) -> Kernels | None:
    """Return the kernels that bound partial rows; None: the datasheet's formulas."""
    own = problem.kernels
    if not isinstance(own, MeasuredKernels):
        return own
    return LowerBoundKernels(own=own, peak_flop_per_s=problem.hardware.matmul_flop_per_s)
