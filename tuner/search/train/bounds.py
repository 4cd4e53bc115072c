"""Lower bound on the step time of given degrees, over all options and pipeline layouts.

With W the seconds of one micro-batch, both passes, on all devices together, P the least that the
slowest device can need (layouts.py), G the part of W that a zero-bubble schedule may put into the
bubble, m micro-batches, v stages on each of p devices,

    step >= m P + max(0, W - P - 2 G) / v + boundaries + once

which is the closed form of tuner/costs/train/step.py at the smallest possible slowest device: it
grows with P since m >= 1 / v. G is 0 where the target has no such schedule. Boundaries are those of
the nearest rank order. `once` counts the fixed cost, the optimizer on an even share of the
parameters, and the part of the gradient reduction that overlap leaves exposed.

The search uses it twice. A row (all degrees) is priced with the unit costs of one option, which
bounds every option that only adds recomputation, offloading or less overlap. A partial row (no
expert degrees yet) is priced with one expert as wide as one of the model's in place of all experts:
its router scores one expert, its GEMMs are not split, and there is no all-to-all, so that no real
expert degrees are faster.

Measurements say little about a single expert in place of all, and an extrapolated curve may be
slower there than for real experts, so that the bound would not hold. Its GEMMs therefore run at the
device's peak, and GEMMs with a side of one element (those of its router) are free. Everything else
has the shapes of the real model.

Letters: C candidates.
"""

from dataclasses import dataclass, replace

import numpy as np

from tuner.arrays import Floats
from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import Hardware, ModelShape, taken
from tuner.costs.train.units import UnitCosts, unit_costs
from tuner.prices.datasheet import peak_s
from tuner.prices.lookups import NotedPrices
from tuner.prices.measured import MeasuredPrices
from tuner.prices.ops import Op, Prices
from tuner.prices.train.collectives import all_gather_s, groups, send_s
from tuner.prices.train.host_link import optimizer_s
from tuner.search.train.candidate_prices import (
    ROUNDING,
    deferred_wgrad_s,
    pass_times,
    sum_over_layers,
)
from tuner.search.train.candidates import TIME_DEGREES, Candidates, to_strategies
from tuner.search.train.degrees import Degrees
from tuner.search.train.layouts import PassTimes, min_peak_s, total_s
from tuner.search.train.option_table import OptionTable
from tuner.search.train.options import DISPATCH, RANK_ORDERS, Choice, OptionSpace
from tuner.search.train.problem import TrainProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Settings that the best option may use under the targets and limits."""

    zero_stages: frozenset[int]
    rank_orders: tuple[str, ...]
    zero_bubble: bool


def single_expert(shape: ModelShape) -> ModelShape:
    """Replace all experts by one that takes every copy of every token."""
    experts = np.minimum(shape.experts, 1.0)
    return replace(shape, experts=experts, num_groups=1.0, groups_per_token=1.0)


def degrees_bound_s(
    problem: TrainProblem, strategies: Strategies, units: UnitCosts, allowed: Allowed
) -> Floats:
    """Lower bound on the step time of every candidate in any layout, in seconds."""
    columns = len(np.atleast_1d(strategies.num_microbatches))
    times = pass_times(problem, units, columns)
    work_s = total_s(problem.model, times)
    pipeline = np.asarray(strategies.pipeline)
    peak_s = _peak_s(problem, times, pipeline)
    later_s = deferred_wgrad_s(problem, units) if allowed.zero_bubble else 0.0
    bubble_s = np.maximum(work_s - peak_s - 2.0 * later_s, 0.0) / strategies.virtual_pipeline
    least = strategies.num_microbatches * peak_s + bubble_s
    least = least + _boundaries_s(problem, strategies, allowed)
    bound_s: Floats = (least + _once_s(problem, strategies, units, allowed)) * ROUNDING
    return bound_s


def _peak_s(problem: TrainProblem, times: PassTimes, pipeline: Floats) -> Floats:
    target = problem.capabilities
    if target.uneven_layout:
        return min_peak_s(problem.model, times, pipeline=pipeline.astype(np.int64))
    stage_layers = problem.model.num_layers // pipeline
    uniform_s = stage_layers * np.minimum(times.dense_s, times.moe_s)
    return np.maximum(uniform_s + times.end_s, total_s(problem.model, times) / pipeline)


def _boundaries_s(problem: TrainProblem, strategies: Strategies, allowed: Allowed) -> Numbers:
    s, constants = strategies, problem.constants
    sent = s.element_bytes * s.tokens * problem.shape.residual_width / s.tensor
    best_s: Numbers = np.inf
    for order in allowed.rank_orders:
        group = groups(s, problem.hardware, order=tuple(order.split("-"))).boundary
        best_s = np.minimum(best_s, send_s(sent, group, problem.hardware, constants))
    crossings = 2.0 * (s.pipeline - 1.0)
    repeated_crossings = np.where(
        np.equal(s.virtual_pipeline, 1.0),
        crossings / s.pipeline * (s.num_microbatches - 1.0),
        0.0,
    )
    return (crossings + repeated_crossings) * best_s * constants.boundary_exposed_ratio


def _once_s(
    problem: TrainProblem, strategies: Strategies, units: UnitCosts, allowed: Allowed
) -> Numbers:
    s, constants, shape = strategies, problem.constants, problem.shape
    dense = sum_over_layers(shape, units, "trained") / s.pipeline
    experts = sum_over_layers(shape, units, "expert_trained") / s.pipeline
    dense_shards, expert_shards = s.data * s.context, s.expert_data
    is_sharded = bool(allowed.zero_stages - {0})
    local = dense / dense_shards + experts / expert_shards if is_sharded else dense + experts
    once_s = local * _optimizer_s(problem) + constants.step_fixed_s
    if allowed.zero_stages <= {0, 1}:
        once_s = once_s + constants.gradient_exposed_ratio * _gradient_reduction_s(
            problem, s, dense, allowed
        )
    return once_s


def _optimizer_s(problem: TrainProblem) -> Numbers:
    """Seconds per parameter, on the device or offloaded, whichever is faster."""
    on_device_s, on_host_s = (
        optimizer_s(offload, problem.hardware, problem.constants) for offload in (0.0, 1.0)
    )
    return np.minimum(on_device_s, on_host_s)


def _gradient_reduction_s(
    problem: TrainProblem, strategies: Strategies, dense: Numbers, allowed: Allowed
) -> Numbers:
    """Seconds of the dense gradient reduction in the best rank order."""
    nearest: Numbers = np.inf
    for order in allowed.rank_orders:
        group = groups(strategies, problem.hardware, order=tuple(order.split("-"))).shared
        moved = all_gather_s(
            dense * strategies.gradient_bytes, group, problem.hardware, problem.constants
        )
        nearest = np.minimum(nearest, moved)
    return nearest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LowerBoundPrices:
    """Measured prices, except for the experts and the router."""

    measured: Prices
    hardware: Hardware

    def seconds(self, op: Op) -> Numbers:
        """Wall time: experts at the peak, GEMMs with a side of one element free."""
        axes = op.axes
        if op.operation == "grouped_gemm":
            # Either gradient has as many operations as the forward pass.
            multiplied = axes["experts"] * axes["largest"] * axes["hidden"]
            return peak_s(2.0 * multiplied * (axes["inner"] + axes["ffn"]), self.hardware)
        if op.operation == "gemm" and np.all(
            np.minimum(np.minimum(axes["m"], axes["n"]), axes["k"]) <= 1.0
        ):
            return 0.0
        return self.measured.seconds(op)


def lower_bound_prices(problem: TrainProblem) -> Prices | None:
    """Return the prices that bound partial rows; None: the datasheet's formulas."""
    prices = problem.prices
    if isinstance(prices, NotedPrices):
        # No plan runs one expert in place of all.
        prices = prices.source
    if not isinstance(prices, MeasuredPrices):
        return prices
    return LowerBoundPrices(measured=prices, hardware=problem.hardware)


def partial_bounds_s(problem: TrainProblem, options: OptionSpace, degrees: Degrees) -> Floats:
    """Bound every partial row with a single expert in place of all, in seconds."""
    ones = np.ones(degrees.num_partials, dtype=np.int64)
    partials = degrees.dense_rows(degrees.partials_N["dense"]) | {
        name: degrees.partials_N[name] for name in ("virtual_pipeline", "micro_batch")
    }
    fastest = {axis: np.zeros_like(ones) for axis in options.choices}
    for knob in DISPATCH:
        if knob.never_worse and (best := knob.never_worse[-1][1]) in options.choices[knob.field]:
            fastest[knob.field] = ones * options.choices[knob.field].index(best)
    candidates = Candidates(
        rows=partials | {"expert": ones, "expert_tensor": ones}, options=fastest
    )
    strategies = to_strategies(problem, options, candidates)
    first, inverse = candidates.same(TIME_DEGREES)
    # A rank that holds a part of an expert adds to its part of the main gradient: none here.
    units = unit_costs(
        single_expert(problem.shape),
        replace(taken(strategies, first), gradient_bytes=0.0),
        problem.hardware,
        problem.constants,
        prices=lower_bound_prices(problem),
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
