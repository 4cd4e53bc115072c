"""Measured points turned into curves, planes and grids that interpolate and extrapolate.

Times of kernels are close to powers of their sizes, piece by piece, so everything is interpolated
linearly in logarithms. Below the smallest measured size the time is that of the smallest: launches
and weights dominate there. Beyond the largest it goes on in proportion to the size, which is how a
saturated device behaves.

Letters: N points, Q query points, X and Y axes of a plane, A B M axes of a grid.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SizeCurve:
    """Seconds over one size."""

    log_x_N: Floats
    """Logarithms of the sizes, ascending."""
    log_s_N: Floats

    def seconds(self, x_Q: Floats) -> Floats:
        """Interpolate; proportional beyond the last point."""
        log_x_Q = np.log(np.maximum(x_Q, 1e-9))
        beyond_Q = np.maximum(log_x_Q - self.log_x_N[-1], 0.0)
        return np.asarray(np.exp(np.interp(log_x_Q, self.log_x_N, self.log_s_N) + beyond_Q))

    @property
    def largest(self) -> float:
        """The largest measured size."""
        return float(np.exp(self.log_x_N[-1]))


def build_curve(x_N: npt.NDArray[np.generic], time_s_N: Floats) -> SizeCurve:
    """Make a curve of points in any order; of several at one size the fastest counts."""
    size_N = np.maximum(np.asarray(x_N, dtype=np.float64), 0.5)
    unique_U, code_N = np.unique(size_N, return_inverse=True)
    best_U = np.full(len(unique_U), np.inf)
    np.minimum.at(best_U, code_N, time_s_N)
    return SizeCurve(log_x_N=np.log(unique_U), log_s_N=np.log(best_U))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plane:
    """Seconds over two sizes."""

    log_x_X: Floats
    log_y_Y: Floats
    log_s_XY: Floats

    def seconds(self, x_Q: Floats, y_Q: Floats) -> Floats:
        """Interpolate bilinearly; proportional beyond the last point of either axis."""
        log_x_Q = np.log(np.maximum(x_Q, 1e-9))
        log_y_Q = np.log(np.maximum(y_Q, 1e-9))
        row_Q, share_x_Q, beyond_x_Q = _places(self.log_x_X, log_x_Q)
        col_Q, share_y_Q, beyond_y_Q = _places(self.log_y_Y, log_y_Q)
        next_row_Q = np.minimum(row_Q + 1, len(self.log_x_X) - 1)
        next_col_Q = np.minimum(col_Q + 1, len(self.log_y_Y) - 1)
        table = self.log_s_XY
        near = table[row_Q, col_Q] * (1.0 - share_y_Q) + table[row_Q, next_col_Q] * share_y_Q
        far = (
            table[next_row_Q, col_Q] * (1.0 - share_y_Q) + table[next_row_Q, next_col_Q] * share_y_Q
        )
        log_s_Q = near * (1.0 - share_x_Q) + far * share_x_Q + beyond_x_Q + beyond_y_Q
        return np.asarray(np.exp(log_s_Q))


def _places(axis_N: Floats, at_Q: Floats) -> tuple[npt.NDArray[np.intp], Floats, Floats]:
    """The point below each query, the share of the way to the next, and what lies beyond."""
    inside_Q = np.clip(at_Q, axis_N[0], axis_N[-1])
    low_Q = np.clip(np.searchsorted(axis_N, inside_Q, side="right") - 1, 0, len(axis_N) - 1)
    next_Q = np.minimum(low_Q + 1, len(axis_N) - 1)
    width_Q = axis_N[next_Q] - axis_N[low_Q]
    share_Q = np.where(width_Q > 0.0, (inside_Q - axis_N[low_Q]) / np.maximum(width_Q, 1e-12), 0.0)
    return low_Q, share_Q, np.maximum(at_Q - axis_N[-1], 0.0)


def build_plane(
    x_N: npt.NDArray[np.generic], y_N: npt.NDArray[np.generic], time_s_N: Floats
) -> Plane:
    """Make a plane of points in any order.

    Some sizes were measured for few partners: gaps along y are interpolated. Corners are often
    missing, because what they need did not fit into memory; they are filled in proportion to x from
    the next smaller x, then from the next larger x.
    """
    size_x = np.maximum(np.asarray(x_N, dtype=np.float64), 0.5)
    size_y = np.maximum(np.asarray(y_N, dtype=np.float64), 0.5)
    x_X, row_N = np.unique(size_x, return_inverse=True)
    y_Y, col_N = np.unique(size_y, return_inverse=True)
    best_XY = np.full((len(x_X), len(y_Y)), np.inf)
    np.minimum.at(best_XY, (row_N, col_N), time_s_N)
    log_s_XY = np.where(np.isinf(best_XY), np.nan, np.log(best_XY))
    log_x_X, log_y_Y = np.log(x_X), np.log(y_Y)
    for row, log_s_Y in enumerate(log_s_XY):
        known = np.flatnonzero(~np.isnan(log_s_Y))
        inside = np.arange(known[0], known[-1] + 1)
        log_s_XY[row, inside] = np.interp(log_y_Y[inside], log_y_Y[known], log_s_Y[known])
    for row in range(1, len(x_X)):
        scaled_Y = log_s_XY[row - 1] + (log_x_X[row] - log_x_X[row - 1])
        log_s_XY[row] = np.where(np.isnan(log_s_XY[row]), scaled_Y, log_s_XY[row])
    for row in range(len(x_X) - 2, -1, -1):
        log_s_XY[row] = np.where(np.isnan(log_s_XY[row]), log_s_XY[row + 1], log_s_XY[row])
    return Plane(log_x_X=log_x_X, log_y_Y=log_y_Y, log_s_XY=log_s_XY)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grid:
    """Seconds of GEMMs over their widths and rows."""

    log_a_A: Floats
    log_b_B: Floats
    log_m_M: Floats
    log_s_ABM: Floats

    def curve(self, *, a: float, b: float) -> SizeCurve:
        """The curve over rows of a GEMM of these widths.

        Between measured widths the logarithm of the time is interpolated, beyond them the time
        grows in proportion to the width.
        """
        rows = []
        for axis, value in ((self.log_a_A, a), (self.log_b_B, b)):
            low_Q, share_Q, beyond_Q = _places(axis, np.array([np.log(max(value, 1e-9))]))
            low, share = int(low_Q[0]), float(share_Q[0])
            rows.append((low, min(low + 1, len(axis) - 1), share, float(beyond_Q[0])))
        (a0, a1, share_a, beyond_a), (b0, b1, share_b, beyond_b) = rows
        table = self.log_s_ABM
        log_s_M = (
            (1.0 - share_a) * (1.0 - share_b) * table[a0, b0]
            + share_a * (1.0 - share_b) * table[a1, b0]
            + (1.0 - share_a) * share_b * table[a0, b1]
            + share_a * share_b * table[a1, b1]
        )
        return SizeCurve(log_x_N=self.log_m_M, log_s_N=log_s_M + beyond_a + beyond_b)
