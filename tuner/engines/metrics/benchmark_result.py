"""Shared by the readers of benchmark results: the JSON document and the common fields.

SGLang's client grew out of vLLM's, and most of their fields have the same names. A result is one
JSON document, or a JSON line per run, of which the last counts. It comes from the user's program,
so its size is bounded, and what it lacks is reported in one line.
"""

import json
from typing import Any, Final, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from profilers import errors
from tuner.engines.metrics.benchmark_run import BenchmarkRun, Spread

MAX_RESULT_BYTES: Final = 64 * 2**20
"""Some 100,000 requests with a time each; times per token are never needed."""

S_PER_MS: Final = 1e-3


class BenchmarkReader(Protocol):
    """Reads the result of one client.

    Raises:
        ValueError: it is not what that client writes, or no request completed.
    """

    def __call__(self, content: bytes) -> BenchmarkRun: ...


class Fields(BaseModel):
    """Fields of a result that are read; others are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class CommonResult(Fields):
    """Fields that both clients report for a run; times in milliseconds."""

    completed: int
    duration: float = Field(gt=0.0)
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    mean_ttft_ms: float
    median_ttft_ms: float
    p90_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None
    mean_tpot_ms: float
    median_tpot_ms: float
    p90_tpot_ms: float | None = None
    p99_tpot_ms: float | None = None

    def run(
        self, *, failed: int | None, goodput: float | None, prefix_hit: float | None = None
    ) -> BenchmarkRun:
        """Convert to a run."""
        return BenchmarkRun(
            completed=self.completed,
            failed=failed,
            duration_s=self.duration,
            ttft_s=_spread(
                self.mean_ttft_ms, self.median_ttft_ms, self.p90_ttft_ms, self.p99_ttft_ms
            ),
            tpot_s=_spread(
                self.mean_tpot_ms, self.median_tpot_ms, self.p90_tpot_ms, self.p99_tpot_ms
            ),
            requests_per_s=self.request_throughput,
            output_tokens_per_s=self.output_throughput,
            goodput_requests_per_s=goodput,
            mean_input_tokens=self.total_input_tokens / self.completed,
            mean_output_tokens=self.total_output_tokens / self.completed,
            prefix_hit_ratio=prefix_hit,
        )


def _spread(mean_ms: float, p50_ms: float, p90_ms: float | None, p99_ms: float | None) -> Spread:
    return Spread(
        mean=mean_ms * S_PER_MS,
        p50=p50_ms * S_PER_MS,
        p90=None if p90_ms is None else p90_ms * S_PER_MS,
        p99=None if p99_ms is None else p99_ms * S_PER_MS,
    )


def document(content: bytes, *, client: str) -> dict[str, Any]:
    """Return the JSON object of a result, the last one of JSON lines.

    Raises:
        ValueError: there is none.
    """
    lines = content.strip().splitlines()
    for text in (content, lines[-1] if lines else b""):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    raise ValueError(f"not the JSON of {client}: cut short, or of another program")


def first_problem(error: ValidationError, *, client: str) -> str:
    """Return in one line which field of a result cannot be read."""
    return f"not the JSON of {client}: {errors.first_problem(error)}"
