"""`python -m sglang.bench_serving --output-file`: a line of JSON a run, appended.

Milliseconds; warm-up requests are not counted. The line tells no failed requests: `errors` of
`--output-details` does, and with `--goodput` (`request_goodput`, `slo_attainment`) the requests
sent are request_goodput * duration / slo_attainment. A run where everything failed has no results
at all. `cache_report` (`--cache-report`) says what the prefix cache held.

Source: `benchmark` of sglang/benchmark/serving.py and sglang/benchmark/goodput.py, SGLang 0.5.23.
"""

from pydantic import Field, ValidationError

from tuner.verify.adapters.bench_result import Fields, Told, document, first_problem
from tuner.verify.deployments.records import BenchRun

_CLIENT = "sglang.bench_serving"
_PERCENT = 100.0


class _Cache(Fields):
    cache_hit_rate_pct: float = Field(ge=0.0, le=100.0)


class _Result(Told):
    request_goodput: float | None = Field(default=None, ge=0.0)
    slo_attainment: float | None = Field(default=None, ge=0.0, le=1.0)
    errors: list[str | None] | None = None
    cache_report: _Cache | None = None


def read(content: bytes) -> BenchRun:
    """Read the last line of a result file."""
    values = document(content, client=_CLIENT)
    if not values.get("completed"):
        raise ValueError(f"{_CLIENT} tells no request that completed")
    try:
        found = _Result.model_validate(values)
    except ValidationError as error:
        raise ValueError(first_problem(error, client=_CLIENT)) from error
    cache = found.cache_report
    return found.run(
        failed=_failed(found),
        goodput=found.request_goodput,
        prefix_hit=cache.cache_hit_rate_pct / _PERCENT if cache else None,
    )


def _failed(found: _Result) -> int | None:
    if found.errors is not None:
        return max(0, len(found.errors) - found.completed)
    if found.request_goodput and found.slo_attainment:
        sent = round(found.request_goodput * found.duration / found.slo_attainment)
        return max(0, sent - found.completed)
    return None
