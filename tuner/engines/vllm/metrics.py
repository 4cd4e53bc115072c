"""`vllm bench serve --save-result`: one JSON object a run.

Milliseconds; `median_*` always, `p50_*` and others by `--metric-percentiles`. TPOT is a request's
time after its first token divided by its further tokens; warm-up requests (`--num-warmups`) are not
counted. `request_goodput` is null without `--goodput`; releases before 0.10 wrote that key with a
colon. Without `failed`, requests of `num_prompts` that did not complete count as failed.

Source: `benchmark` and `main_async` of vllm/benchmarks/serve.py, vLLM 0.33.0.
Not covered: pooling models, which have no tokens to time.
"""

from pydantic import Field, ValidationError

from tuner.engines.metrics.benchmark_result import CommonResult, document, first_problem
from tuner.engines.metrics.benchmark_run import BenchmarkRun

_CLIENT = "vllm bench serve"


class _VllmResult(CommonResult):
    failed: int | None = Field(default=None, ge=0)
    num_prompts: int | None = None
    request_goodput: float | None = None
    goodput_before_0_10: float | None = Field(default=None, alias="request_goodput:")


def read(content: bytes) -> BenchmarkRun:
    """Read a result file."""
    values = document(content, client=_CLIENT)
    if values.get("completed") == 0:
        raise ValueError(f"{_CLIENT} reports no completed request")
    try:
        result = _VllmResult.model_validate(values)
    except ValidationError as error:
        raise ValueError(first_problem(error, client=_CLIENT)) from error
    failed, goodput = result.failed, result.request_goodput
    if failed is None and result.num_prompts is not None:
        failed = max(0, result.num_prompts - result.completed)
    return result.run(
        failed=failed, goodput=result.goodput_before_0_10 if goodput is None else goodput
    )
