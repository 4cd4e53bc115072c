"""The root of a search: every partial row bounded before any expert degree is chosen.

Measurements say little about a single expert in place of all, and an extrapolated curve may be
slower there than for real experts, so that the bound would not hold. Its GEMMs therefore run at the
device's peak, and GEMMs with a side of one element (those of its router) are free. Everything else
has the shapes of the real model.
"""

from dataclasses import dataclass, replace

import numpy as np

from tuner.arrays import Floats
from tuner.config.columns import Numbers
from tuner.config.shapes import Hardware, taken
from tuner.costs.train.units import unit_costs
from tuner.prices.datasheet import peak_s
from tuner.prices.lookups import NotedPrices
from tuner.prices.measured import MeasuredPrices
from tuner.prices.ops import Op, Prices
from tuner.search.train.axes import DISPATCH, RANK_ORDERS, Choice
from tuner.search.train.bounds import Allowed, degrees_bound_s, single_expert
from tuner.search.train.candidates import TIME_DEGREES, Candidates, to_strategies
from tuner.search.train.degrees import Degrees
from tuner.search.train.option_table import OptionTable
from tuner.search.train.options import OptionSpace
from tuner.search.train.problem import TrainProblem


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
