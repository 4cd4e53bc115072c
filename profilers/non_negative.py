"""Least squares in relative error with weights that are never negative.

Source: the active-set method of Lawson and Hanson, Solving Least Squares Problems, 1974, chapter
23. It ends after finitely many changes of the set; the limit on steps is only for rounding.

Letters: N points, F columns.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ENOUGH = 1e-9
"""Columns whose gradient is below this, relative to the steepest at the start, add nothing."""


def relative_fit(columns_NF: Floats, seconds_N: Floats) -> Floats:
    """Weights w >= 0 that minimise the sum of (columns w / seconds - 1)^2.

    The result is positive at every point: where the best weights leave a point at zero, columns
    that are zero somewhere are not used.
    """
    weights_F = _solved(columns_NF, seconds_N)
    if np.all(columns_NF @ weights_F > 0.0):
        return weights_F
    everywhere_F = np.all(columns_NF > 0.0, axis=0)
    return _solved(columns_NF * everywhere_F, seconds_N)


def _solved(columns_NF: Floats, seconds_N: Floats) -> Floats:
    scaled_NF = columns_NF / seconds_N[:, None]
    size_F = np.linalg.norm(scaled_NF, axis=0)
    usable_F = size_F > 0.0
    unit_NF = scaled_NF / np.where(usable_F, size_F, 1.0)
    target_N = np.ones(len(seconds_N))
    weights_F = np.zeros(columns_NF.shape[1])
    free_F = np.zeros(columns_NF.shape[1], dtype=bool)
    steepest = float(np.max(unit_NF.T @ target_N, initial=0.0))
    for _ in range(10 * len(weights_F)):
        slope_F = unit_NF.T @ (target_N - unit_NF @ weights_F)
        slope_F[free_F | ~usable_F] = -np.inf
        best = int(np.argmax(slope_F))
        if slope_F[best] <= ENOUGH * steepest:
            break
        free_F[best] = True
        weights_F = _within(unit_NF, target_N, weights_F, free_F)
    return np.where(usable_F, weights_F / np.where(usable_F, size_F, 1.0), 0.0)


def _within(
    unit_NF: Floats, target_N: Floats, weights_F: Floats, free_F: NDArray[np.bool_]
) -> Floats:
    """Go towards the best weights of the free columns until none is negative; shrinks `free_F`."""
    while True:
        wanted_F = np.zeros_like(weights_F)
        wanted_F[free_F] = np.linalg.lstsq(unit_NF[:, free_F], target_N, rcond=None)[0]
        below_F = free_F & (wanted_F <= 0.0)
        if not below_F.any():
            return wanted_F
        share = np.min(weights_F[below_F] / (weights_F[below_F] - wanted_F[below_F] + 1e-300))
        weights_F = weights_F + share * (wanted_F - weights_F)
        free_F &= weights_F > ENOUGH
        weights_F = np.where(free_F, weights_F, 0.0)
