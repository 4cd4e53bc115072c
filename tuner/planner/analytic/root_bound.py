"""The first look at a search: every cell bounded before any expert degree is chosen."""

import numpy as np
import numpy.typing as npt

from tuner.costs.analytic.shapes import taken
from tuner.costs.analytic.units import unit_costs
from tuner.planner.analytic.axes import RANK_ORDERS, Choice
from tuner.planner.analytic.bounds import Allowed, imagined_expert, least_step_s
from tuner.planner.analytic.candidates import TIME_DEGREES, Candidates, strategies_of
from tuner.planner.analytic.degrees import Degrees
from tuner.planner.analytic.least_kernels import least_kernels
from tuner.planner.analytic.option_table import WayTable
from tuner.planner.analytic.options import Ways
from tuner.planner.analytic.problem import Question

Floats = npt.NDArray[np.float64]


def cell_bounds_s(question: Question, ways: Ways, degrees: Degrees) -> Floats:
    """Bound every cell by an imagined expert."""
    one = np.ones(degrees.num_cells, dtype=np.int64)
    cells = degrees.dense_rows(degrees.cells_N["dense"]) | {
        name: degrees.cells_N[name] for name in ("virtual_pipeline", "micro_batch")
    }
    fastest = {axis: np.zeros_like(one) for axis in ways.choices}
    for axis, choice in (("a2a_overlap", True), ("cuda_graph", "full_iteration")):
        if choice in ways.choices[axis]:
            fastest[axis] = one * ways.choices[axis].index(choice)
    candidates = Candidates(rows=cells | {"expert": one, "expert_tensor": one}, ways=fastest)
    strategies = strategies_of(question, ways, candidates)
    first, inverse = candidates.same(TIME_DEGREES)
    units = unit_costs(
        imagined_expert(question.shape),
        taken(strategies, first),
        question.hardware,
        question.constants,
        kernels=least_kernels(question),
    )
    anything = Allowed(
        zero_stages=frozenset({0, 1, 2, 3}),
        rank_orders=RANK_ORDERS,
        zero_bubble="zero_bubble" in question.capabilities.schedules,
    )
    return least_step_s(question, strategies, units.taken(inverse), anything)


def allowed_by(ways: Ways, table: WayTable) -> Allowed:
    """Collect what some way of a table makes use of."""

    def choices(axis: str) -> list[Choice]:
        index = np.unique(table.ways_TA[:, table.axes.index(axis)])
        return [ways.choices[axis][i] for i in index]

    return Allowed(
        zero_stages=frozenset(int(zero) for zero in choices("zero_stage")),  # type: ignore[arg-type] # numbers
        rank_orders=tuple(str(order) for order in choices("rank_order")),
        zero_bubble="zero_bubble" in choices("schedule"),
    )
