"""The root of a search: every partial row bounded before any expert degree is chosen.

Measurements say little about a single expert in place of all, and an extrapolated curve may be
slower there than for real experts, so that the bound would not hold. Its GEMMs therefore run at the
device's peak, and GEMMs with a side of one element (those of its router) are free. Everything else
has the shapes of the real model.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Numbers
from tuner.costs.train.kernels import AttentionShape, ExpertSeconds, Kernels
from tuner.costs.train.measured_kernels import MeasuredKernels
from tuner.costs.train.shapes import taken
from tuner.costs.train.units import unit_costs
from tuner.search.train.axes import DISPATCH, RANK_ORDERS, Choice
from tuner.search.train.bounds import Allowed, degrees_bound_s, single_expert
from tuner.search.train.candidates import TIME_DEGREES, Candidates, to_strategies
from tuner.search.train.degrees import Degrees
from tuner.search.train.option_table import OptionTable
from tuner.search.train.options import OptionSpace
from tuner.search.train.problem import TrainProblem

Floats = npt.NDArray[np.float64]


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


def partial_bounds_s(problem: TrainProblem, options: OptionSpace, degrees: Degrees) -> Floats:
    """Bound every partial row with a single expert in place of all, in seconds."""
    one = np.ones(degrees.num_partials, dtype=np.int64)
    partials = degrees.dense_rows(degrees.partials_N["dense"]) | {
        name: degrees.partials_N[name] for name in ("virtual_pipeline", "micro_batch")
    }
    fastest = {axis: np.zeros_like(one) for axis in options.choices}
    for knob in DISPATCH:
        if knob.never_worse and (best := knob.never_worse[-1][1]) in options.choices[knob.field]:
            fastest[knob.field] = one * options.choices[knob.field].index(best)
    candidates = Candidates(rows=partials | {"expert": one, "expert_tensor": one}, options=fastest)
    strategies = to_strategies(problem, options, candidates)
    first, inverse = candidates.same(TIME_DEGREES)
    units = unit_costs(
        single_expert(problem.shape),
        taken(strategies, first),
        problem.hardware,
        problem.constants,
        kernels=lower_bound_kernels(problem),
    )
    anything = Allowed(
        zero_stages=frozenset({0, 1, 2, 3}),
        rank_orders=RANK_ORDERS,
        zero_bubble="zero_bubble" in problem.capabilities.schedules,
    )
    return degrees_bound_s(problem, strategies, units.taken(inverse), anything)


def allowed_by(options: OptionSpace, table: OptionTable) -> Allowed:
    """Collect what some option of a table uses."""

    def choices(axis: str) -> list[Choice]:
        index = np.unique(table.options_TA[:, table.axes.index(axis)])
        return [options.choices[axis][i] for i in index]

    return Allowed(
        zero_stages=frozenset(int(zero) for zero in choices("zero_stage")),  # type: ignore[arg-type] # numbers
        rank_orders=tuple(str(order) for order in choices("rank_order")),
        zero_bubble="zero_bubble" in choices("schedule"),
    )
