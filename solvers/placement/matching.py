"""One-to-one matchings of greatest value, many at once.

    X matchings   K rows and as many columns of each

Few columns: the dynamic program over subsets of columns (Held and Karp's, J. SIAM 10(1), 1962), as
the first r rows use up some r columns; K 2^(K-1) steps, each on all X matchings together. Many
columns: shortest augmenting paths (Jonker and Volgenant, Computing 38, 1987), one matching after
the other, O(K^3). Both are exact.
"""

import functools
from typing import Final

import numpy as np

from solvers.placement.ranks import Floats, Ints

MOST_COLUMNS_OF_SUBSETS: Final = 8
"""Beyond, 2^K arrays of X numbers cost more than X augmenting-path matchings."""


def best_matchings(value_XKK: Floats) -> tuple[Floats, Ints]:
    """Return the greatest value of each matching, and the column of each row that gives it."""
    num_columns = value_XKK.shape[-1]
    if num_columns <= MOST_COLUMNS_OF_SUBSETS:
        return _by_subsets(value_XKK)
    column_XK = np.array([augmented(value_KK) for value_KK in value_XKK], dtype=np.int64)
    column_XK = column_XK.reshape(-1, num_columns)
    chosen_XK = np.take_along_axis(value_XKK, column_XK[:, :, None], axis=2)[:, :, 0]
    return chosen_XK.sum(axis=1), column_XK


def best_values(value_KKX: Floats) -> Floats:
    """Return the greatest value of each matching alone; matchings along the last axis."""
    num_columns = len(value_KKX)
    if num_columns > MOST_COLUMNS_OF_SUBSETS:
        return best_matchings(np.moveaxis(value_KKX, -1, 0))[0]
    best_MX = np.zeros((1, value_KKX.shape[-1]))
    for row in range(num_columns):
        before_MR, column_MR = _steps(num_columns)[row]
        next_MX = np.full((len(before_MR), best_MX.shape[1]), -np.inf)
        for next_X, before_R, column_R in zip(next_MX, before_MR, column_MR, strict=True):
            for before, column in zip(before_R, column_R, strict=True):
                np.maximum(next_X, best_MX[before] + value_KKX[row, column], out=next_X)
        best_MX = next_MX
    return np.asarray(best_MX[0])


def _by_subsets(value_XKK: Floats) -> tuple[Floats, Ints]:
    num_columns, num_matchings = value_XKK.shape[-1], len(value_XKK)
    value_KKX = np.ascontiguousarray(np.moveaxis(value_XKK, 0, -1))
    best_MX = np.zeros((1, num_matchings))
    choices: list[Ints] = []
    for row in range(num_columns):
        before_MR, column_MR = _steps(num_columns)[row]
        through_MRX = best_MX[before_MR] + value_KKX[row][column_MR]
        choices.append(through_MRX.argmax(axis=1))
        best_MX = through_MRX.max(axis=1)
    column_XK = np.empty((num_matchings, num_columns), dtype=np.int64)
    subset_X = np.zeros(num_matchings, dtype=np.int64)
    for row in reversed(range(num_columns)):
        before_MR, column_MR = _steps(num_columns)[row]
        choice_X = choices[row][subset_X, np.arange(num_matchings)]
        column_XK[:, row] = column_MR[subset_X, choice_X]
        subset_X = before_MR[subset_X, choice_X]
    return best_MX[0], column_XK


@functools.cache
def _steps(num_columns: int) -> tuple[tuple[Ints, Ints], ...]:
    """By row: [subset][choice] the number of the subset before, and the column that is added.

    Subsets of r columns are numbered in the order of their bit masks.
    """
    masks = np.arange(1 << num_columns)
    bits = (masks[:, None] >> np.arange(num_columns)) & 1
    size = bits.sum(axis=1)
    number = np.zeros_like(masks)
    for count in range(num_columns + 1):
        number[size == count] = np.arange((size == count).sum())
    steps = []
    for count in range(1, num_columns + 1):
        mask_M = masks[size == count]
        column_MR = np.nonzero(bits[size == count])[1].reshape(-1, count)
        steps.append((number[mask_M[:, None] ^ (1 << column_MR)], column_MR))
    return tuple(steps)


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
