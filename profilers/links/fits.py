"""Alpha-beta fits of links: t(m) = a + m / b, with their residuals and range of validity.

    a    seconds before the first byte     b    bytes a second

Fitted in relative error (weights 1/t), since sizes span decades and all matter equally:
min over a >= 0, 1/b > 0 of  sum ((a + m/b) / t - 1)^2. If one line leaves a residual above
`KINK_RATIO` and there are four sizes, two lines over smaller and larger sizes (protocols
change with size: eager and rendezvous, LL and Simple) are tried, and kept if they halve the
largest residual. Outside the measured sizes a fit says nothing; it carries the smallest and the
largest of them.

Source: Hockney, Parallel Computing 20, 1994.
Letters: P points.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

KINK_RATIO: Final = 0.1
LEAST_BYTES_S: Final = 1e-15
"""Seconds per byte below which a line counts as flat: a petabyte a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One stretch of sizes."""

    smallest_bytes: float
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """The time of a message of any measured size."""

    lines: tuple[Line, ...]
    largest_bytes: float
    residual_ratio: float
    """Largest relative error on the points it was fitted to."""

    @property
    def latency_s(self) -> float:
        """Of the smallest messages."""
        return self.lines[0].latency_s

    @property
    def bytes_per_s(self) -> float:
        """Of the largest messages."""
        return self.lines[-1].bytes_per_s

    def seconds(self, size_bytes: float) -> float:
        """Seconds of a message; beyond the measured sizes the last line goes on."""
        chosen = [line for line in self.lines if line.smallest_bytes <= size_bytes]
        line = chosen[-1] if chosen else self.lines[0]
        return line.latency_s + size_bytes / line.bytes_per_s


def fit_link(bytes_P: Sequence[float], seconds_P: Sequence[float]) -> LinkFit:
    """Fit one line, or two if one is not enough.

    Raises:
        ValueError: fewer than two sizes, or times that are not positive.
    """
    order = np.argsort(np.asarray(bytes_P, dtype=np.float64))
    m_P = np.asarray(bytes_P, dtype=np.float64)[order]
    t_P = np.asarray(seconds_P, dtype=np.float64)[order]
    if len(np.unique(m_P)) < 2 or not (t_P > 0.0).all():
        raise ValueError("a link is fitted to positive times of two sizes at least")
    one = _fit((m_P,), (t_P,))
    if one.residual_ratio <= KINK_RATIO or len(m_P) < 4:
        return one
    two = min(
        (_fit((m_P[:k], m_P[k:]), (t_P[:k], t_P[k:])) for k in range(2, len(m_P) - 1)),
        key=lambda fit: fit.residual_ratio,
    )
    return two if two.residual_ratio <= 0.5 * one.residual_ratio else one


def _fit(sizes: tuple[Floats, ...], times: tuple[Floats, ...]) -> LinkFit:
    lines, worst = [], 0.0
    for m_P, t_P in zip(sizes, times, strict=True):
        a, slope = _line(m_P, t_P)
        lines.append(Line(smallest_bytes=float(m_P[0]), latency_s=a, bytes_per_s=1.0 / slope))
        worst = max(worst, float(np.abs((a + m_P * slope) / t_P - 1.0).max()))
    return LinkFit(lines=tuple(lines), largest_bytes=float(sizes[-1][-1]), residual_ratio=worst)


def _line(m_P: Floats, t_P: Floats) -> tuple[float, float]:
    """Latency and seconds per byte of least relative squares, neither negative."""
    columns = np.stack([1.0 / t_P, m_P / t_P], axis=1)
    (a, slope), *_ = np.linalg.lstsq(columns, np.ones_like(t_P), rcond=None)
    if a < 0.0:
        a, slope = 0.0, float((m_P / t_P).sum() / ((m_P / t_P) ** 2).sum())
    if slope < LEAST_BYTES_S:
        a, slope = float((1.0 / t_P).sum() / ((1.0 / t_P) ** 2).sum()), LEAST_BYTES_S
    return float(a), float(slope)
