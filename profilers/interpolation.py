"""Predict the time of a case from measured ones.

Kernels, per (operation, kind, dtype, direction):

    base  t0(x) = c0 + c1 flop(x) + c2 bytes(x),  c >= 0, least squares of t0 / t - 1
    time  t(x) = t0(x) * exp(r(x))

r is the Kriging interpolant, with covariance exp(-d / L), of the log residuals ln(t / t0) at the
measured points; d is the distance in octaves over all axes and L = 4. It is exact at measured
points, between two of them nearly linear in log space, and fades to the base alone far away.
A rising base keeps growing as the physics does, where a fitted polynomial would turn. Beyond
`MAX_POINTS` points, as imported tables have them, each prediction takes the `NEIGHBOURS` nearest
alone (ordinary practice in geostatistics: Chiles and Delfiner, Geostatistics, 2012, section 3.6).
Source: the covariance is Ornstein and Uhlenbeck's; Matheron, Economic Geology 58, 1963. The choice
of base and L is ours.

Collectives, per kind and inside one group of (ranks, stride, world): piecewise linear in
ln(t) over ln(bytes), since protocols switch with the size. Below the smallest message the latency
stays; above the largest the bandwidth stays. A group never measured is predicted by the base
alone, with (ranks - 1) latencies in place of one, and counts as extrapolated.

Every prediction says whether it is extrapolated: some axis lies outside the measured range by more
than 5 %. The caller decides what that is worth.

Letters: N points, A axes in the order of `records.AXES`.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from profilers.records import AXES, Measurement, Profile, Status
from profilers.work import work

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

BY_GROUP = frozenset({"collective", "rendezvous"})
"""Operations whose first axis is interpolated inside one group shape, the other axes."""
BY_RANK = ("link", "every_rank")
"""Tables whose axes name ranks, between which nothing can be interpolated."""

LENGTH_OCTAVES = 4.0
MAX_POINTS = 1500
"""Points whose mutual covariance is held and solved at once: 18 MB, a fraction of a second."""
NEIGHBOURS = 32
CHUNK = 256
"""Predictions whose distances to all points are held at once."""
TOLERANCE_RATIO = 1.05


class Series(NamedTuple):
    """What one curve is about."""

    operation: str
    kind: str
    dtype: str
    direction: str


class Curve(Protocol):
    """Times of one series over its axes."""

    @property
    def num_points(self) -> int:
        """Distinct sizes that were measured."""

    def predict(self, axes_NA: Floats) -> tuple[Floats, Bools]:
        """Seconds of each size, and whether it lies outside what was measured."""


def fit_curves(profile: Profile) -> Mapping[Series, Curve]:
    """Fit every series of a profile; the time of a case is the slowest rank's expectation."""
    return fit_rows(profile.measurements)


def fit_rows(rows: Sequence[Measurement]) -> Mapping[Series, Curve]:
    """Fit every series among the rows; failed ones are left out, and who is slower than whom."""
    points: dict[Series, dict[tuple[int, ...], float]] = {}
    for row in rows:
        case = row.case
        if row.status is not Status.OK or case.operation in BY_RANK:
            continue
        series = Series(case.operation, case.kind, case.dtype, case.direction)
        place = tuple(case.axes[axis] for axis in AXES[case.operation])
        means = points.setdefault(series, {})
        means[place] = max(means.get(place, 0.0), row.expected_s)
    return {series: fit(series, means) for series, means in sorted(points.items())}


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
    """A physical base and what the measured points add to it."""

    series: Series
    coefficients: Floats
    """Seconds per call, per flop, per byte."""
    octaves_NA: Floats
    pull_N: Floats
    """Kriging weights of the log residuals."""

    @property
    def num_points(self) -> int:
        return len(self.octaves_NA)

    def base_s(self, axes_NA: Floats) -> Floats:
        """The physical part alone."""
        seconds: Floats = _features(self.series, axes_NA) @ self.coefficients
        return seconds

    def predict(self, axes_NA: Floats) -> tuple[Floats, Bools]:
        octaves_NA = _octaves(axes_NA)
        residual_N = _covariance(octaves_NA, self.octaves_NA) @ self.pull_N
        seconds = self.base_s(axes_NA) * np.exp(residual_N)
        return seconds, _outside(octaves_NA, self.octaves_NA)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NeighbourCurve:
    """A physical base and what the nearest measured points add to it."""

    series: Series
    coefficients: Floats
    """Seconds per call, per flop, per byte."""
    octaves_NA: Floats
    residual_N: Floats
    """ln(t / t0) at the measured points."""

    @property
    def num_points(self) -> int:
        return len(self.octaves_NA)

    def predict(self, axes_NA: Floats) -> tuple[Floats, Bools]:
        octaves_NA = _octaves(axes_NA)
        parts = [
            self._residual(octaves_NA[start : start + CHUNK])
            for start in range(0, len(octaves_NA), CHUNK)
        ]
        base_N = _features(self.series, axes_NA) @ self.coefficients
        seconds: Floats = base_N * np.exp(np.concatenate(parts))
        return seconds, _outside(octaves_NA, self.octaves_NA)

    def _residual(self, octaves_QA: Floats) -> Floats:
        """Solve one small Kriging system per asked point Q over its K nearest measured ones."""
        squares_QN = (
            (octaves_QA**2).sum(axis=1)[:, None]
            + (self.octaves_NA**2).sum(axis=1)
            - 2.0 * octaves_QA @ self.octaves_NA.T
        )
        near_QK = np.argpartition(squares_QN, NEIGHBOURS, axis=1)[:, :NEIGHBOURS]
        points_QKA = self.octaves_NA[near_QK]
        apart_QKK = np.linalg.norm(points_QKA[:, :, None] - points_QKA[:, None], axis=3)
        away_QK = np.linalg.norm(points_QKA - octaves_QA[:, None], axis=2)
        weights_QK1 = np.linalg.solve(
            np.exp(-apart_QKK / LENGTH_OCTAVES), np.exp(-away_QK / LENGTH_OCTAVES)[:, :, None]
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

    @property
    def num_points(self) -> int:
        return sum(len(log_bytes) for log_bytes, _ in self.log_times.values())

    def predict(self, axes_NA: Floats) -> tuple[Floats, Bools]:
        seconds: Floats = _features(self.series, axes_NA) @ self.coefficients
        extrapolated = np.ones(len(axes_NA), dtype=bool)
        for group, (log_bytes, log_s) in self.log_times.items():
            here = np.all(axes_NA[:, 1:] == np.array(group), axis=1)
            asked = np.log(np.maximum(axes_NA[here, 0], 1.0))
            beyond = np.maximum(asked - log_bytes[-1], 0.0)
            seconds[here] = np.exp(np.interp(asked, log_bytes, log_s) + beyond)
            slack = np.log(TOLERANCE_RATIO)
            extrapolated[here] = (asked < log_bytes[0] - slack) | (beyond > slack)
        return seconds, extrapolated


def _fit_kernel(series: Series, axes_NA: Floats, seconds_N: Floats) -> Curve:
    coefficients = _non_negative_fit(_features(series, axes_NA), seconds_N)
    base_N = _features(series, axes_NA) @ coefficients
    octaves_NA = _octaves(axes_NA)
    residual_N: Floats = np.log(seconds_N / base_N)
    if len(seconds_N) > MAX_POINTS:
        for array in (coefficients, octaves_NA, residual_N):
            array.setflags(write=False)
        return NeighbourCurve(
            series=series,
            coefficients=coefficients,
            octaves_NA=octaves_NA,
            residual_N=residual_N,
        )
    covariance_NN = _covariance(octaves_NA, octaves_NA)
    pull_N = np.linalg.solve(covariance_NN, residual_N).astype(np.float64)
    for array in (coefficients, octaves_NA, pull_N):
        array.setflags(write=False)
    return KernelCurve(
        series=series, coefficients=coefficients, octaves_NA=octaves_NA, pull_N=pull_N
    )


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
        coefficients=_non_negative_fit(_features(series, axes_NA), seconds_N),
        log_times=log_times,
    )


def _features(series: Series, axes_NA: Floats) -> Floats:
    names = AXES[series.operation]
    axes = {name: axes_NA[:, index] for index, name in enumerate(names)}
    needed = work(
        series.operation,
        kind=series.kind,
        dtype=series.dtype,
        direction=series.direction,
        axes=axes,
    )
    calls = np.ones(len(axes_NA))
    if series.operation in BY_GROUP:
        calls = np.maximum(axes["ranks"] - 1.0, 1.0)
    return np.stack([calls, needed.flop, needed.bytes], axis=1)


def _non_negative_fit(features_NF: Floats, seconds_N: Floats) -> Floats:
    """Least squares in relative error over every set of features; the best that is >= 0.

    Three features have seven sets, so all are tried; one feature alone always has a solution >= 0.
    """
    scaled_NF = features_NF / seconds_N[:, None]
    size_F = np.maximum(np.linalg.norm(scaled_NF, axis=0), 1e-300)
    unit_NF = scaled_NF / size_F
    num_features = features_NF.shape[1]
    best, best_error = np.zeros(num_features), np.inf
    usable = [index for index in range(num_features) if np.any(features_NF[:, index] > 0.0)]
    for count in range(1, len(usable) + 1):
        for chosen in itertools.combinations(usable, count):
            columns = list(chosen)
            found, *_ = np.linalg.lstsq(unit_NF[:, columns], np.ones(len(seconds_N)), rcond=None)
            error = float(np.sum((unit_NF[:, columns] @ found - 1.0) ** 2))
            everywhere = np.all(features_NF[:, columns] @ (found / size_F[columns]) > 0.0)
            if np.all(found >= 0.0) and everywhere and error < best_error - 1e-12:
                best = np.zeros(num_features)
                best[columns] = found / size_F[columns]
                best_error = error
    return best


def _octaves(axes_NA: Floats) -> Floats:
    octaves: Floats = np.log2(np.maximum(axes_NA, 1.0))
    return octaves


def _covariance(left_NA: Floats, right_MA: Floats) -> Floats:
    distance_NM = np.linalg.norm(left_NA[:, None, :] - right_MA[None, :, :], axis=2)
    covariance: Floats = np.exp(-distance_NM / LENGTH_OCTAVES)
    return covariance


def _outside(octaves_NA: Floats, measured_MA: Floats) -> Bools:
    slack = np.log2(TOLERANCE_RATIO)
    below = octaves_NA < measured_MA.min(axis=0) - slack
    above = octaves_NA > measured_MA.max(axis=0) + slack
    outside: Bools = np.any(below | above, axis=1)
    return outside
