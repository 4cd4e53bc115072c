"""Predict the time of a case from measured ones.

Kernels, per (operation, kind, dtype, direction):

    base  t0(x) = c0 + c1 flop(x) + c2 bytes(x) [+ ...],  c >= 0, least squares of t0 / t - 1
    time  t(x) = t0(x) * exp(r(x))

With `POINTS_PER_COLUMN` points for each, the base has the finer columns of profilers/features.py,
except those that fewer than `LEAST_WITNESSES` points have: one disturbed point could give such a
column any weight. r is the Kriging
interpolant, with covariance exp(-d / L), of the log residuals ln(t / t0) at the measured points; d
is the distance in octaves over all axes. With few points L = 4 and r is exact at measured points,
between two of them nearly linear in log space, and fades to the base far away. From
`TUNED_POINTS` points on, L and the share of the residuals that is noise (a nugget on the diagonal)
are those of a short list that predict every point best from all others; leaving one out has a
closed form (Dubrule, Mathematical Geology 15, 1983). A rising base keeps growing as the physics
does, where a fitted polynomial would turn. Beyond `MAX_POINTS` points, as imported tables have
them, each prediction takes only the `NEIGHBOURS` nearest (ordinary practice in geostatistics:
Chiles and Delfiner, Geostatistics, 2012, section 3.6). Source: the covariance is Ornstein and
Uhlenbeck's; Matheron, Economic Geology 58, 1963. The choice of bases and of what L may be is ours.

Collectives, per kind and inside one group of (ranks, stride, world): piecewise linear in
ln(t) over ln(bytes), since protocols switch with the size. Below the smallest message the latency
stays; above the largest the bandwidth stays. Arrival skew over the work before a collective grows
with the root of the work outside the measured ones (profilers/links/arrival_skew.py).
A group never measured is predicted by the base only, with (ranks - 1) latencies in place of one,
and counts as extrapolated.

Every prediction says whether it is extrapolated: some axis lies outside the measured range by more
than 5 %. The caller decides what to do with it.

Letters: N points, A axes in the order of `records.AXES`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from profilers.features import detailed, plain
from profilers.non_negative import relative_fit
from profilers.records import AXES, Measurement, Profile
from profilers.series import BY_GROUP, Series, together_s

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LENGTH_OCTAVES = 4.0
LENGTHS_OCTAVES = (4.0, 2.0, 8.0, 16.0)
NOISE_RATIOS = (0.0, 0.02, 0.1, 0.3, 1.0)
"""Variance of the noise over that of the residuals."""
POINTS_PER_COLUMN = 2
LEAST_WITNESSES = 3
"""The least points that a column of the base has; or all, if there are fewer."""
TUNED_POINTS = 16
MAX_TUNED_POINTS = 400
"""Largest number of points that are tuned: more take seconds, and imported tables, means over many
runs, stay exact."""
MAX_POINTS = 1500
"""Points whose mutual covariance is in memory and solved at once: 18 MB, a fraction of a second."""
NEIGHBOURS = 32
CHUNK = 256
"""Predictions whose distances to all points are in memory at once."""
TOLERANCE_RATIO = 1.05
COINCIDENT_NOISE = 1e-9


class Curve(Protocol):
    """Times of one series over its axes."""

    def predict(self, axes_NA: Floats) -> tuple[Floats, Bools]:
        """Seconds of each size, and whether it lies outside what was measured."""


def fit_curves(profile: Profile) -> Mapping[Series, Curve]:
    """Fit every series of a profile to the time of all ranks together (profilers/series.py)."""
    return fit_rows(profile.measurements)


def fit_rows(rows: Sequence[Measurement]) -> Mapping[Series, Curve]:
    """Fit every series among the rows; failed rows and `BY_RANK` tables are left out."""
    return {series: fit(series, means) for series, means in sorted(together_s(rows).items())}


def fit(series: Series, expected_s: Mapping[tuple[int, ...], float]) -> Curve:
    """Fit one series from the seconds at each measured size.

    Raises:
        ValueError: there is no point.
    """
    if not expected_s:
        raise ValueError(f"{series} has no measured point")
    axes_NA = np.array(sorted(expected_s), dtype=np.float64)
    # A time below the clock's resolution reads as zero, which has no logarithm.
    listed = [max(expected_s[place], 1e-12) for place in sorted(expected_s)]
    seconds_N = np.array(listed, dtype=np.float64)
    if series.operation in BY_GROUP:
        return _fit_collective(series, axes_NA, seconds_N)
    return _fit_kernel(series, axes_NA, seconds_N)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelCurve:
    """A physical base and a Kriging interpolant of its residuals."""

    series: Series
    coefficients: Floats
    """Seconds per call, per flop, per byte; or per column of `features.detailed`."""
    octaves_NA: Floats
    pull_N: Floats
    """Kriging weights of the log residuals."""
    length_octaves: float

    def base_s(self, axes_NA: Floats) -> Floats:
        """The physical part only."""
        seconds: Floats = _columns(self.series, axes_NA, self.coefficients) @ self.coefficients
        return seconds

    def predict(self, axes_NA: Floats) -> tuple[Floats, Bools]:
        octaves_NA = _octaves(axes_NA)
        near_NM = _covariance(octaves_NA, self.octaves_NA, length_octaves=self.length_octaves)
        residual_N = near_NM @ self.pull_N
        seconds = self.base_s(axes_NA) * np.exp(residual_N)
        return seconds, _outside(octaves_NA, self.octaves_NA)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NeighbourCurve:
    """A physical base and the Kriging interpolant of the nearest measured points."""

    series: Series
    coefficients: Floats
    """Seconds per call, per flop, per byte."""
    octaves_NA: Floats
    residual_N: Floats
    """ln(t / t0) at the measured points."""

    def predict(self, axes_NA: Floats) -> tuple[Floats, Bools]:
        octaves_NA = _octaves(axes_NA)
        parts = [
            self._residual(octaves_NA[start : start + CHUNK])
            for start in range(0, len(octaves_NA), CHUNK)
        ]
        base_N = _plain(self.series, axes_NA) @ self.coefficients
        seconds: Floats = base_N * np.exp(np.concatenate(parts))
        return seconds, _outside(octaves_NA, self.octaves_NA)

    def _residual(self, octaves_QA: Floats) -> Floats:
        """Solve one small Kriging system per queried point Q over its K nearest measured ones."""
        squares_QN = (
            (octaves_QA**2).sum(axis=1)[:, None]
            + (self.octaves_NA**2).sum(axis=1)
            - 2.0 * octaves_QA @ self.octaves_NA.T
        )
        near_QK = np.argpartition(squares_QN, NEIGHBOURS, axis=1)[:, :NEIGHBOURS]
        points_QKA = self.octaves_NA[near_QK]
        distance_QKK = np.linalg.norm(points_QKA[:, :, None] - points_QKA[:, None], axis=3)
        away_QK = np.linalg.norm(points_QKA - octaves_QA[:, None], axis=2)
        weights_QK1 = np.linalg.solve(
            np.exp(-distance_QKK / LENGTH_OCTAVES), np.exp(-away_QK / LENGTH_OCTAVES)[:, :, None]
        )
        residual_Q: Floats = (weights_QK1[:, :, 0] * self.residual_N[near_QK]).sum(axis=1)
        return residual_Q


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CollectiveCurve:
    """Measured times over message sizes, for each group shape."""

    series: Series
    coefficients: Floats
    log_times: Mapping[tuple[int, int, int], tuple[Floats, Floats]]
    """(ranks, stride, world) to ln(bytes) ascending and ln(seconds)."""

    def predict(self, axes_NA: Floats) -> tuple[Floats, Bools]:
        seconds: Floats = _plain(self.series, axes_NA) @ self.coefficients
        extrapolated = np.ones(len(axes_NA), dtype=bool)
        for group, (log_bytes, log_s) in self.log_times.items():
            here = np.all(axes_NA[:, 1:] == np.array(group), axis=1)
            log_query = np.log(np.maximum(axes_NA[here, 0], 1.0))
            beyond = np.maximum(log_query - log_bytes[-1], 0.0)
            inside_s = np.exp(np.interp(log_query, log_bytes, log_s))
            if self.series.operation == "rendezvous":
                outside = log_query - np.clip(log_query, log_bytes[0], log_bytes[-1])
                seconds[here] = inside_s * np.exp(0.5 * outside)
            else:
                seconds[here] = inside_s * np.exp(beyond)
            slack = np.log(TOLERANCE_RATIO)
            extrapolated[here] = (log_query < log_bytes[0] - slack) | (beyond > slack)
        return seconds, extrapolated


def _fit_kernel(series: Series, axes_NA: Floats, seconds_N: Floats) -> Curve:
    columns_NF = _plain(series, axes_NA)
    if len(seconds_N) <= MAX_POINTS:
        finer_NF = detailed(series.operation, dtype=series.dtype, axes_NA=axes_NA)
        if finer_NF is not None and len(seconds_N) >= POINTS_PER_COLUMN * finer_NF.shape[1]:
            columns_NF = finer_NF
    coefficients = relative_fit(columns_NF * _is_witnessed(columns_NF), seconds_N)
    octaves_NA = _octaves(axes_NA)
    residual_N: Floats = np.log(seconds_N / (columns_NF @ coefficients))
    if len(seconds_N) > MAX_POINTS:
        for array in (coefficients, octaves_NA, residual_N):
            array.setflags(write=False)
        return NeighbourCurve(
            series=series,
            coefficients=coefficients,
            octaves_NA=octaves_NA,
            residual_N=residual_N,
        )
    length_octaves, pull_N = _kriged(octaves_NA, residual_N)
    for array in (coefficients, octaves_NA, pull_N):
        array.setflags(write=False)
    return KernelCurve(
        series=series,
        coefficients=coefficients,
        octaves_NA=octaves_NA,
        pull_N=pull_N,
        length_octaves=length_octaves,
    )


def _is_witnessed(columns_NF: Floats) -> Bools:
    """Return for each column [F] whether every point, or enough of them, have it."""
    count_F = np.count_nonzero(columns_NF, axis=0)
    witnessed_F: Bools = count_F >= min(LEAST_WITNESSES, len(columns_NF))
    return witnessed_F


def _kriged(octaves_NA: Floats, residual_N: Floats) -> tuple[float, Floats]:
    """Choose the length and the share of noise that predict each point best from all others.

    Returns:
        The length, and the weights.
    """
    count = len(residual_N)
    is_tuned = TUNED_POINTS <= count <= MAX_TUNED_POINTS
    best_error, chosen = np.inf, (LENGTH_OCTAVES, residual_N)
    for length_octaves in LENGTHS_OCTAVES if is_tuned else (LENGTH_OCTAVES,):
        covariance_NN = _covariance(octaves_NA, octaves_NA, length_octaves=length_octaves)
        for noise_ratio in NOISE_RATIOS if is_tuned else (0.0,):
            inverse_NN = _inverse(covariance_NN + noise_ratio * np.eye(count))
            pull_N = inverse_NN @ residual_N
            left_out_N = pull_N / np.diag(inverse_NN)
            error = float(np.mean(np.abs(left_out_N)))
            if error < best_error - 1e-12:
                best_error, chosen = error, (length_octaves, pull_N)
    return chosen


def _inverse(covariance_NN: Floats) -> Floats:
    """Invert a covariance; points whose logarithms are the same number get a little noise."""
    try:
        return np.asarray(np.linalg.inv(covariance_NN), dtype=np.float64)
    except np.linalg.LinAlgError:
        return _inverse(covariance_NN + COINCIDENT_NOISE * np.eye(len(covariance_NN)))


def _fit_collective(series: Series, axes_NA: Floats, seconds_N: Floats) -> CollectiveCurve:
    log_times = {}
    for group in sorted({(int(row[1]), int(row[2]), int(row[3])) for row in axes_NA}):
        here = np.all(axes_NA[:, 1:] == np.array(group), axis=1)
        log_times[group] = (
            np.log(np.maximum(axes_NA[here, 0], 1.0)),
            np.log(seconds_N[here]),
        )
    return CollectiveCurve(
        series=series,
        coefficients=relative_fit(_plain(series, axes_NA), seconds_N),
        log_times=log_times,
    )


def _columns(series: Series, axes_NA: Floats, coefficients: Floats) -> Floats:
    """The columns that these coefficients were fitted to; both kinds differ in their number."""
    columns_NF = _plain(series, axes_NA)
    if columns_NF.shape[1] == len(coefficients):
        return columns_NF
    finer_NF = detailed(series.operation, dtype=series.dtype, axes_NA=axes_NA)
    return columns_NF if finer_NF is None else finer_NF


def _plain(series: Series, axes_NA: Floats) -> Floats:
    calls_N = np.ones(len(axes_NA))
    if series.operation in BY_GROUP:
        ranks = axes_NA[:, AXES[series.operation].index("ranks")]
        calls_N = np.maximum(ranks - 1.0, 1.0)
    return plain(
        series.operation,
        kind=series.kind,
        dtype=series.dtype,
        direction=series.direction,
        axes_NA=axes_NA,
        calls_N=calls_N,
    )


def _octaves(axes_NA: Floats) -> Floats:
    octaves: Floats = np.log2(np.maximum(axes_NA, 1.0))
    return octaves


def _covariance(left_NA: Floats, right_MA: Floats, *, length_octaves: float) -> Floats:
    distance_NM = np.linalg.norm(left_NA[:, None, :] - right_MA[None, :, :], axis=2)
    covariance: Floats = np.exp(-distance_NM / length_octaves)
    return covariance


def _outside(octaves_NA: Floats, measured_MA: Floats) -> Bools:
    slack = np.log2(TOLERANCE_RATIO)
    below = octaves_NA < measured_MA.min(axis=0) - slack
    above = octaves_NA > measured_MA.max(axis=0) + slack
    outside: Bools = np.any(below | above, axis=1)
    return outside
