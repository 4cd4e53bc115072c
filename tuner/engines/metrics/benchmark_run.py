"""Measurements of a server by a benchmark client."""

from typing import Annotated

from pydantic import Field

from profilers.records import Record, Seconds
from profilers.steps.config import Count, Size
from tuner.plans.serve import Ratio

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Spread(Record):
    """Statistics of a latency over requests, as far as reported."""

    mean: Seconds
    p50: Seconds | None = None
    p90: Seconds | None = None
    p99: Seconds | None = None


class BenchmarkRun(Record):
    """One run of a benchmark client."""

    completed: Count
    failed: Size | None
    """Requests that failed; None if the client neither reports them nor was given the number of
    requests."""
    duration_s: Seconds
    ttft_s: Spread
    tpot_s: Spread
    """Seconds per output token after the first."""
    requests_per_s: Ratio
    """Completed requests per second."""
    output_tokens_per_s: Ratio
    goodput_requests_per_s: Ratio | None = None
    """Requests that met every SLO, as counted by the client; None if it was given none."""
    mean_input_tokens: Ratio | None = None
    mean_output_tokens: Ratio | None = None
    prefix_hit_ratio: Share | None = None
    """Share of the prompt tokens found in the prefix cache, if the client queries the server."""
