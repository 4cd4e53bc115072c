"""Bounds on the flow that can stay in its group, whoever is grouped: two relaxations and their sum.

    E experts a layer   N groups of n = E / N experts   F flow[e, f]   x(e, f) = 1: in one group

Whatever the grouping, x is 0 or 1 with at most n ones in each row and column, so (b-matching, by
linear duality) for all u, v >= 0

    <F, x> <= n (sum u + sum v) + sum over e, f of max(0, F(e, f) - u(e) - v(f))

and u, v are improved in turn: for given v the best u(e) is the n-th largest F(e, f) - v(f).

With exactly n experts a group in both layers x / n = A B^T, where the columns of A and B are the
groups, orthonormal, and both span the constant vector. Hence (singular values s, F' = F with rows
and columns centred; von Neumann's trace inequality)

    <F, x> <= sum(F) / N + n * (s_1 + ... + s_{N-1})(F')

the bound that Donath and Hoffman (IBM J. Res. Dev. 17(5), 1973) gave for partitions of a graph.
The first is tight on few heavy cells, the second on many light ones. Both hold for any matrix, so F
is cut at a height: what is above goes to the first, what is below to the second, and the sum of the
two is a bound again, far below either. The search is for the best height.
"""

from typing import Final

import numpy as np

from solvers.placement.ranks import Floats

DUAL_ROUNDS: Final = 4
"""Rounds of improving u and v; more change only the fourth digit."""
EIGENVALUE_ERROR: Final = 4.0 * float(np.finfo(np.float64).eps)
"""Backward error of LAPACK's solvers, with room, per row of a symmetric matrix and relative to its
largest eigenvalue."""


def most_staying_by_matching(flow_EE: Floats, *, group_size: int) -> float:
    """Return the bound from what one expert can have in its group; groups may be smaller too."""
    column_F = np.zeros(flow_EE.shape[1])
    row_E = _nth_largest(flow_EE, group_size, axis=1) / 2.0
    best = float(flow_EE.sum())
    for _ in range(DUAL_ROUNDS):
        column_F = _nth_largest(flow_EE - row_E[:, None], group_size, axis=0)
        row_E = _nth_largest(flow_EE - column_F, group_size, axis=1)
        above_EE = flow_EE - row_E[:, None] - column_F
        np.maximum(above_EE, 0.0, out=above_EE)
        value = group_size * float(row_E.sum() + column_F.sum()) + float(above_EE.sum())
        best = min(best, value)
    return best


def most_staying_by_spectrum(flow_EE: Floats, *, num_groups: int) -> float:
    """Return the bound from singular values; every group has the same size in both layers."""
    num_experts = len(flow_EE)
    total = float(flow_EE.sum())
    if num_groups == 1:
        return total
    mean = total / num_experts**2
    centred_EE = flow_EE - flow_EE.mean(axis=0) - flow_EE.mean(axis=1)[:, None] + mean
    squared_E = np.linalg.eigvalsh(centred_EE @ centred_EE.T)
    squared_E = np.maximum(squared_E, 0.0) + EIGENVALUE_ERROR * num_experts * squared_E[-1]
    largest = np.sqrt(np.maximum(squared_E[num_experts - num_groups + 1 :], 0.0))
    return total / num_groups + num_experts / num_groups * float(largest.sum())


def most_staying_cut_at(flow_EE: Floats, height: float, *, num_groups: int) -> float:
    """Return the bound of what is below the height plus that of what is above."""
    below_EE = np.minimum(flow_EE, height)
    group_size = len(flow_EE) // num_groups
    return most_staying_by_spectrum(below_EE, num_groups=num_groups) + most_staying_by_matching(
        flow_EE - below_EE, group_size=group_size
    )


def _nth_largest(value_EF: Floats, nth: int, *, axis: int) -> Floats:
    place = value_EF.shape[axis] - nth
    ordered = np.partition(value_EF, place, axis=axis)
    return np.asarray(np.maximum(np.take(ordered, place, axis=axis), 0.0))
