"""The root of a search: every partial row bounded before any expert degree is chosen."""

import numpy as np
import numpy.typing as npt

from tuner.costs.train.shapes import taken
from tuner.costs.train.units import unit_costs
from tuner.search.train.axes import DISPATCH, RANK_ORDERS, Choice
from tuner.search.train.bounds import Allowed, degrees_bound_s, single_expert
from tuner.search.train.candidates import TIME_DEGREES, Candidates, to_strategies
from tuner.search.train.degrees import Degrees
from tuner.search.train.least_kernels import lower_bound_kernels
from tuner.search.train.option_table import OptionTable
from tuner.search.train.options import OptionSpace
from tuner.search.train.problem import TrainProblem

Floats = npt.NDArray[np.float64]


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
