"""A one-to-one matching of greatest value, by OR-Tools' cost scaling; exact to `STEPS`.

K rows and as many columns
"""

from typing import Final

import numpy as np
from ortools.graph.python.linear_sum_assignment import SimpleLinearSumAssignment

from solvers.placement.ranks import Floats, Ints

STEPS: Final = 2.0**40
"""Whole numbers that stand for the range of values, which OR-Tools' are."""


def augmented(value_KK: Floats) -> Ints:
    """Return the column of each row in a matching of greatest value."""
    cost_KK = value_KK.max() - value_KK
    cost_KK = np.rint(cost_KK * (STEPS / (float(cost_KK.max()) or 1.0))).astype(np.int64)
    row_KK, column_KK = np.indices(cost_KK.shape)
    matching = SimpleLinearSumAssignment()
    matching.add_arcs_with_cost(row_KK.ravel(), column_KK.ravel(), cost_KK.ravel())
    matching.solve()
    return np.array([matching.right_mate(row) for row in range(len(cost_KK))])
