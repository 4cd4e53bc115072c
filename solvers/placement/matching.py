"""A one-to-one matching of greatest value.

    K rows and as many columns

Shortest augmenting paths (Jonker and Volgenant, Computing 38, 1987), O(K^3); exact.
"""

import numpy as np

from solvers.placement.ranks import Floats, Ints


def augmented(value_KK: Floats) -> Ints:
    """Return the column of each row in a matching of greatest value, by augmenting paths."""
    cost_KK = value_KK.max() - value_KK
    size = len(cost_KK)
    row_price, column_price = np.zeros(size), np.zeros(size + 1)
    row_of_column = np.full(size + 1, -1)
    for row in range(size):
        here = size
        row_of_column[here] = row
        distance, came_from = np.full(size, np.inf), np.full(size, size)
        is_done = np.zeros(size + 1, dtype=bool)
        while row_of_column[here] >= 0:
            is_done[here] = True
            row_here = row_of_column[here]
            reduced = cost_KK[row_here] - row_price[row_here] - column_price[:size]
            is_open = ~is_done[:size]
            is_shorter = is_open & (reduced < distance)
            distance[is_shorter] = reduced[is_shorter]
            came_from[is_shorter] = here
            there = int(np.where(is_open, distance, np.inf).argmin())
            step = distance[there]
            done = np.flatnonzero(is_done)
            row_price[row_of_column[done]] += step
            column_price[done] -= step
            distance[is_open] -= step
            here = there
        while here != size:
            row_of_column[here] = row_of_column[came_from[here]]
            here = int(came_from[here])
    column_of_row = np.empty(size, dtype=np.int64)
    column_of_row[row_of_column[:size]] = np.arange(size)
    return column_of_row
