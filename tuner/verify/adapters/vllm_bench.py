"""`vllm bench serve --save-result`: one JSON object a run.

Milliseconds; `median_*` always, `p50_*` and others as `--metric-percentiles` asks. TPOT is a
request's time after its first token over its further tokens, warm-up requests (`--num-warmups`) are
not counted. `request_goodput` is null without `--goodput`; releases before 0.10 wrote that key with
a colon in it. Those without `failed` count as failed what did not complete of `num_prompts`.

Source: `benchmark` and `main_async` of vllm/benchmarks/serve.py, vLLM 0.33.0.
Not covered: pooling models, which have no tokens to time.
"""

from pydantic import Field, ValidationError

from tuner.verify.adapters.bench_result import Told, document, first_problem
from tuner.verify.deployments.records import BenchRun

_CLIENT = "vllm bench serve"


class _Result(Told):
    failed: int | None = Field(default=None, ge=0)
    num_prompts: int | None = None
    request_goodput: float | None = None
    goodput_before_0_10: float | None = Field(default=None, alias="request_goodput:")


def read(content: bytes) -> BenchRun:
    """Read a result file."""
    values = document(content, client=_CLIENT)
    if values.get("completed") == 0:
        raise ValueError(f"{_CLIENT} tells no request that completed")
    try:
        found = _Result.model_validate(values)
    except ValidationError as error:
        raise ValueError(first_problem(error, client=_CLIENT)) from error
    failed, told = found.failed, found.request_goodput
    if failed is None and found.num_prompts is not None:
        failed = max(0, found.num_prompts - found.completed)
    return found.run(failed=failed, goodput=found.goodput_before_0_10 if told is None else told)
