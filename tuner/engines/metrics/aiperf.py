"""AIPerf's `profile_export_aiperf.json`; GenAI-Perf's summary has the same format.

Each metric is an object with its `unit`, `avg` and percentiles. `inter_token_latency` is a
request's time after its first token divided by its further tokens, i.e. TPOT. Warm-up requests are
in `warmup_metrics`. `goodput` is present if SLOs were given, `error_request_count` if a request
failed; a run that was cancelled or cut short says so and is refused.

`profile_export.jsonl` has a line of JSON a request, with its clock and its own metrics.

Source: aiperf/common/models/export_models.py, schema 1.4, and record_models.py, AIPerf 0.13.0.
"""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from tuner.engines.metrics.benchmark_result import Fields, document, first_problem
from tuner.engines.metrics.benchmark_run import BenchmarkRun, Spread
from tuner.engines.metrics.observed import RequestRecord

_CLIENT = "aiperf"
_SECONDS: Final = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}
"""Names of time units in AIPerf and GenAI-Perf."""


class _Metric(Fields):
    unit: str = ""
    avg: float
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class _AiperfResult(Fields):
    request_count: _Metric
    error_request_count: _Metric | None = None
    benchmark_duration: _Metric | None = None
    request_throughput: _Metric
    output_token_throughput: _Metric
    time_to_first_token: _Metric
    inter_token_latency: _Metric
    input_sequence_length: _Metric | None = None
    output_sequence_length: _Metric | None = None
    goodput: _Metric | None = None
    was_cancelled: bool | None = None
    is_complete: bool | None = None
    incomplete_reason: str | None = None


def read(content: bytes) -> BenchmarkRun:
    """Read a summary."""
    try:
        result = _AiperfResult.model_validate(document(content, client=_CLIENT))
    except ValidationError as error:
        raise ValueError(first_problem(error, client=_CLIENT)) from error
    if result.was_cancelled or result.is_complete is False:
        raise ValueError(f"{_CLIENT} was cut short: {result.incomplete_reason or 'cancelled'}")
    completed = round(result.request_count.avg)
    if completed < 1:
        raise ValueError(f"{_CLIENT} reports no completed request")
    failed, duration = result.error_request_count, result.benchmark_duration
    return BenchmarkRun(
        completed=completed,
        failed=round(failed.avg) if failed else 0,
        duration_s=(
            duration.avg * _unit_s(duration)
            if duration
            else completed / result.request_throughput.avg
        ),
        ttft_s=_spread(result.time_to_first_token),
        tpot_s=_spread(result.inter_token_latency),
        requests_per_s=result.request_throughput.avg,
        output_tokens_per_s=result.output_token_throughput.avg,
        goodput_requests_per_s=result.goodput.avg if result.goodput else None,
        mean_input_tokens=_mean(result.input_sequence_length),
        mean_output_tokens=_mean(result.output_sequence_length),
    )


def _spread(metric: _Metric) -> Spread:
    unit_s = _unit_s(metric)
    return Spread(
        mean=metric.avg * unit_s,
        p50=None if metric.p50 is None else metric.p50 * unit_s,
        p90=None if metric.p90 is None else metric.p90 * unit_s,
        p99=None if metric.p99 is None else metric.p99 * unit_s,
    )


def _mean(metric: _Metric | None) -> float | None:
    return metric.avg if metric else None


def _unit_s(metric: _Metric) -> float:
    if metric.unit not in _SECONDS:
        raise ValueError(f"not the JSON of {_CLIENT}: {metric.unit!r} is no unit of time")
    return _SECONDS[metric.unit]


def exported_request(values: Mapping[str, Any]) -> RequestRecord | None:
    """Return the request of a line of records; None of a warm-up, and of one that failed.

    Raises:
        ValueError: the line lacks a metric, or has it in no unit of time.
    """
    said, metrics = values["metadata"], values["metrics"]
    if values.get("error") or said.get("was_cancelled"):
        return None
    if said.get("benchmark_phase", "profiling") != "profiling":
        return None
    ttft = metrics["time_to_first_token"]
    if ttft["unit"] not in _SECONDS:
        raise ValueError(f"{ttft['unit']!r} is no unit of time")
    return RequestRecord(
        arrival_s=said["request_start_ns"] * 1e-9,
        input_tokens=int(metrics["input_sequence_length"]["value"]),
        output_tokens=int(metrics["output_sequence_length"]["value"]),
        ttft_s=ttft["value"] * _SECONDS[ttft["unit"]],
        end_s=said["request_end_ns"] * 1e-9,
    )
