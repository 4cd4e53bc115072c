"""Rate and lengths of a trace, in one pass over any number of rows.

Pairs of input and output length are a uniform sample without replacement (reservoir; Vitter, ACM
TOMS 11(1), 1985, algorithm R) of `SAMPLE_ROWS` rows.

Letters: N requests.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tuner.errors import SpecError
from tuner.spec.files import shown_path
from tuner.spec.serving.traces import TraceChunk, trace_chunks

SAMPLE_ROWS: Final = 65_536

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceSummary:
    """Rate of one trace, and a sample of its lengths."""

    requests: int
    """Rows with input and output tokens."""
    span_s: float
    """Seconds from the first request to the last."""
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
    sample = _Sample(rng=rng)
    first_s = last_s = 0.0
    for chunk in trace_chunks(path):
        if len(chunk.arrival_s_N):
            first_s = first_s if sample.seen else float(chunk.arrival_s_N[0])
            last_s = float(chunk.arrival_s_N[-1])
            sample.add(chunk)
    if sample.seen < 2:
        raise SpecError(
            f"{shown_path(path)}: requests with input and output tokens: {sample.seen};"
            " a load has two or more"
        )
    return TraceSummary(
        requests=sample.seen,
        span_s=last_s - first_s,
        sample_input_N=sample.pairs_N2[: sample.size, 0],
        sample_output_N=sample.pairs_N2[: sample.size, 1],
    )


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
