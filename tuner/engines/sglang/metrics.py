"""`python -m sglang.bench_serving --output-file`: a line of JSON a run, appended.

Milliseconds; warm-up requests are not counted. The line has no count of failed requests: `errors`
of `--output-details` has, and with `--goodput` (`request_goodput`, `slo_attainment`) the requests
sent are request_goodput * duration / slo_attainment. A run where everything failed has no results
at all. `cache_report` (`--cache-report`) has the prefix cache hit rate.

A server started with `--export-metrics-to-file` and `--enable-metrics` writes a line of JSON a
request, with the clock of its arrival and seconds from it.

Source: `benchmark` of sglang/benchmark/serving.py and sglang/benchmark/goodput.py; of requests
`_format_output_data` of sglang/srt/observability/request_metrics_exporter.py and
`convert_to_output_meta_info` of req_time_stats.py there; SGLang 0.5.23. Its forward-pass metrics
are Dynamo's (tuner/engines/metrics/forward_pass.py).
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from tuner.engines.metrics.benchmark_result import CommonResult, Fields, document, first_problem
from tuner.engines.metrics.benchmark_run import BenchmarkRun
from tuner.engines.metrics.observed import RequestRecord

_CLIENT = "sglang.bench_serving"
_PERCENT = 100.0


class _Cache(Fields):
    cache_hit_rate_pct: float = Field(ge=0.0, le=100.0)


class _SglangResult(CommonResult):
    request_goodput: float | None = Field(default=None, ge=0.0)
    slo_attainment: float | None = Field(default=None, ge=0.0, le=1.0)
    errors: list[str | None] | None = None
    cache_report: _Cache | None = None


def read(content: bytes) -> BenchmarkRun:
    """Read the last line of a result file."""
    values = document(content, client=_CLIENT)
    if not values.get("completed"):
        raise ValueError(f"{_CLIENT} reports no completed request")
    try:
        result = _SglangResult.model_validate(values)
    except ValidationError as error:
        raise ValueError(first_problem(error, client=_CLIENT)) from error
    cache = result.cache_report
    return result.run(
        failed=_failed(result),
        goodput=result.request_goodput,
        prefix_hit=cache.cache_hit_rate_pct / _PERCENT if cache else None,
    )


def _failed(result: _SglangResult) -> int | None:
    if result.errors is not None:
        return max(0, len(result.errors) - result.completed)
    if result.request_goodput and result.slo_attainment:
        sent = round(result.request_goodput * result.duration / result.slo_attainment)
        return max(0, sent - result.completed)
    return None


def exported_request(values: Mapping[str, Any]) -> RequestRecord:
    """Return the request of a line that a server exported.

    Raises:
        ValueError: the line lacks a time.
    """
    names = ("request_received_ts", "first_token_latency", "e2e_latency")
    if lacking := [name for name in names if values.get(name) is None]:
        raise ValueError(
            f"a request without {', '.join(lacking)}; SGLang before 0.5.23, or without"
            " --enable-metrics, does not export it: give a client's list"
        )
    return RequestRecord(
        arrival_s=values["request_received_ts"],
        input_tokens=values["prompt_tokens"],
        output_tokens=values["completion_tokens"],
        ttft_s=values["first_token_latency"],
        end_s=values["request_received_ts"] + values["e2e_latency"],
        cached_tokens=values.get("cached_tokens"),
    )
