"""Statistics of a trace: rate, burstiness, gaps, lengths, in one pass over any number of rows.

Lengths are counted exactly, with one counter per number of tokens up to the largest, so means and
quantiles are those of the whole file. Pairs of input and output length are a uniform sample without
replacement (reservoir; Vitter, ACM TOMS 11(1), 1985, algorithm R) of `SAMPLE_ROWS` rows.

Burstiness, for windows of w seconds from the first request on, without the unfinished last one:

    peak ratio            largest count of a window / mean count
    index of dispersion   variance of the counts / mean count; 1 at every w for Poisson arrivals

A load whose index grows with w is not independent at that scale: replay it (is_replayed) rather
than size for its mean.

Letters: N requests; W windows; K numbers of tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tuner.errors import SpecError
from tuner.spec.files import shown_path
from tuner.spec.serving.traces import TraceChunk, trace_chunks

SAMPLE_ROWS: Final = 65_536
GAP_S: Final = 10.0
"""Shortest pause that counts as a gap: longer than any chat response takes."""
WINDOWS_S: Final = (1.0, 10.0, 60.0)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Burstiness:
    """Unevenness of requests over windows."""

    window_s: float
    peak_ratio: float
    """Largest count over the mean count."""
    dispersion: float
    """Variance over the mean of the counts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthCounts:
    """Histogram of token counts."""

    count_K: Ints
    """Requests by number of tokens, from 0."""

    @property
    def mean_tokens(self) -> float:
        """Mean over all requests."""
        return float(self.count_K @ np.arange(len(self.count_K)) / self.count_K.sum())

    def quantile_tokens(self, ratio: float) -> int:
        """Smallest number of tokens that a share `ratio` of the requests does not exceed."""
        reached_K = np.cumsum(self.count_K)
        return int(np.searchsorted(reached_K, ratio * reached_K[-1] * (1.0 - 1e-12)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceSummary:
    """Statistics of one trace."""

    requests: int
    """Rows with input and output tokens."""
    failed: int
    """Rows without input or output tokens, left out."""
    span_s: float
    """Seconds from the first request to the last."""
    gap_cv: float
    """Coefficient of variation of interarrival times; 1 for Poisson arrivals."""
    gaps: int
    """Number of pauses of `GAP_S` or more."""
    gaps_s: float
    """Sum of the pauses of `GAP_S` or more, seconds."""
    largest_gap_s: float
    largest_gap_at_s: float
    """Start of the longest pause, seconds after the first request."""
    burstiness: tuple[Burstiness, ...]
    """Burstiness at each window of `WINDOWS_S` that fits twice into the span."""
    input_tokens: LengthCounts
    output_tokens: LengthCounts
    correlation: float
    """Pearson correlation of input and output length; 0 if either is constant."""
    sample_input_N: Ints
    """Input lengths of the sample."""
    sample_output_N: Ints
    """Output lengths of the sample."""

    @property
    def rate_per_s(self) -> float:
        """Mean requests per second: intervals over the span."""
        return (self.requests - 1) / self.span_s if self.span_s > 0.0 else float("inf")


def summarise_trace(path: Path, *, rng: np.random.Generator) -> TraceSummary:
    """Read a trace once and describe it.

    Raises:
        SpecError: the trace cannot be used, or has fewer than two requests.
    """
    failed = 0
    gaps, pairs, sample = _Gaps(), _Pairs(), _Sample(rng=rng)
    windows = [_Windows(window_s=window_s) for window_s in WINDOWS_S]
    for chunk in trace_chunks(path):
        failed += chunk.failed
        if len(chunk.arrival_s_N):
            gaps.add(chunk.arrival_s_N)
            pairs.add(chunk)
            sample.add(chunk)
            for window in windows:
                window.add(chunk.arrival_s_N)
    if pairs.requests < 2:
        raise SpecError(
            f"{shown_path(path)}: requests with input and output tokens: {pairs.requests};"
            " a load has two or more"
        )
    return TraceSummary(
        requests=pairs.requests,
        failed=failed,
        span_s=gaps.last_s - gaps.first_s,
        gap_cv=gaps.cv(),
        gaps=gaps.long,
        gaps_s=gaps.long_s,
        largest_gap_s=gaps.largest_s,
        largest_gap_at_s=gaps.largest_at_s,
        burstiness=tuple(one for window in windows for one in window.describe()),
        input_tokens=LengthCounts(count_K=pairs.input_K),
        output_tokens=LengthCounts(count_K=pairs.output_K),
        correlation=pairs.correlation(),
        sample_input_N=sample.pairs_N2[: sample.size, 0],
        sample_output_N=sample.pairs_N2[: sample.size, 1],
    )


@dataclass(slots=True)
class _Gaps:
    """Sums over the times between requests."""

    first_s: float = 0.0
    last_s: float = 0.0
    count: int = 0
    squares: float = 0.0
    long: int = 0
    long_s: float = 0.0
    largest_s: float = 0.0
    largest_at_s: float = 0.0
    begun: bool = False

    def add(self, arrival_s_N: Floats) -> None:
        if not self.begun:
            self.first_s = self.last_s = float(arrival_s_N[0])
            self.begun, arrival_s_N = True, arrival_s_N[1:]
        if not len(arrival_s_N):
            return
        gap_s_N = np.diff(arrival_s_N, prepend=self.last_s)
        largest = int(gap_s_N.argmax())
        if gap_s_N[largest] > self.largest_s:
            self.largest_s = float(gap_s_N[largest])
            self.largest_at_s = float(arrival_s_N[largest]) - self.largest_s
        long_s_N = gap_s_N[gap_s_N >= GAP_S]
        self.long += len(long_s_N)
        self.long_s += float(long_s_N.sum())
        self.count += len(gap_s_N)
        self.squares += float(gap_s_N @ gap_s_N)
        self.last_s = float(arrival_s_N[-1])

    def cv(self) -> float:
        mean_s = (self.last_s - self.first_s) / self.count
        if mean_s <= 0.0:
            return 0.0
        return float(np.sqrt(max(0.0, self.squares / self.count - mean_s**2)) / mean_s)


@dataclass(slots=True, kw_only=True)
class _Windows:
    """Counts of full windows, of which only the last is still open."""

    window_s: float
    open_window: int = 0
    open_count: int = 0
    requests: int = 0
    squares: float = 0.0
    peak: int = 0
    first_s: float | None = None

    def add(self, arrival_s_N: Floats) -> None:
        if self.first_s is None:
            self.first_s = float(arrival_s_N[0])
        window_N = np.floor((arrival_s_N - self.first_s) / self.window_s).astype(np.int64)
        window_W, count_W = np.unique(window_N, return_counts=True)
        if window_W[0] == self.open_window:
            count_W[0] += self.open_count
        else:
            self._close(np.array([self.open_count]))
        self._close(count_W[:-1])
        self.open_window, self.open_count = int(window_W[-1]), int(count_W[-1])

    def describe(self) -> Iterator[Burstiness]:
        # The open window ends with the trace; whole ones before it number `open_window`.
        if self.open_window < 2 or not self.requests:
            return
        mean = self.requests / self.open_window
        variance = self.squares / self.open_window - mean**2
        yield Burstiness(
            window_s=self.window_s, peak_ratio=self.peak / mean, dispersion=variance / mean
        )

    def _close(self, count_W: Ints) -> None:
        if len(count_W):
            self.requests += int(count_W.sum())
            self.squares += float(count_W.astype(np.float64) @ count_W)
            self.peak = max(self.peak, int(count_W.max()))


@dataclass(slots=True)
class _Pairs:
    """Counts of lengths and sums of their products."""

    requests: int = 0
    product_sum: float = 0.0
    input_K: Ints = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    output_K: Ints = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    def add(self, chunk: TraceChunk) -> None:
        self.requests += len(chunk.input_tokens_N)
        inputs_N = chunk.input_tokens_N.astype(np.float64)
        self.product_sum += float(inputs_N @ chunk.output_tokens_N)
        self.input_K = _add_counts(self.input_K, chunk.input_tokens_N)
        self.output_K = _add_counts(self.output_K, chunk.output_tokens_N)

    def correlation(self) -> float:
        (one, one_spread), (other, other_spread) = map(_moments, (self.input_K, self.output_K))
        spread = one_spread * other_spread
        covariance = self.product_sum / self.requests - one * other
        return covariance / spread if spread > 0.0 else 0.0


def _add_counts(count_K: Ints, tokens_N: Ints) -> Ints:
    more_K = np.bincount(tokens_N, minlength=len(count_K)).astype(np.int64)
    more_K[: len(count_K)] += count_K
    return more_K


def _moments(count_K: Ints) -> tuple[float, float]:
    """Mean and standard deviation of counted values."""
    value_K = np.arange(len(count_K), dtype=np.float64)
    mean = float(count_K @ value_K / count_K.sum())
    return mean, float(np.sqrt(count_K @ (value_K - mean) ** 2 / count_K.sum()))


@dataclass(slots=True, kw_only=True)
class _Sample:
    """Uniform sample of the requests' lengths (reservoir)."""

    rng: np.random.Generator
    seen: int = 0
    size: int = 0
    pairs_N2: Ints = field(default_factory=lambda: np.zeros((SAMPLE_ROWS, 2), dtype=np.int64))

    def add(self, chunk: TraceChunk) -> None:
        new_N2 = np.stack((chunk.input_tokens_N, chunk.output_tokens_N), axis=1)
        free = min(len(new_N2), SAMPLE_ROWS - self.size)
        self.pairs_N2[self.size : self.size + free] = new_N2[:free]
        self.size += free
        self.seen += free
        new_N2 = new_N2[free:]
        if not len(new_N2):
            return
        # Row number i (from 1) draws one of i places; later rows overwrite earlier ones.
        number_N = np.arange(self.seen + 1, self.seen + 1 + len(new_N2))
        place_N = self.rng.integers(0, number_N)
        kept_N = place_N < SAMPLE_ROWS
        self.pairs_N2[place_N[kept_N]] = new_N2[kept_N]
        self.seen += len(new_N2)
