"""`vllm bench serve --save-result`: one JSON object a run.

Milliseconds; `median_*` always, `p50_*` and others by `--metric-percentiles`. TPOT is a request's
time after its first token divided by its further tokens; warm-up requests (`--num-warmups`) are not
counted. `request_goodput` is null without `--goodput`; releases before 0.10 wrote that key with a
colon. Without `failed`, requests of `num_prompts` that did not complete count as failed.

With `--save-detailed` there are lists with an entry a request besides; of a request that failed
`errors` says why.

A server started with `--enable-logging-iteration-details` writes a line a step, which times the
wait for the step's result alone: scheduling and handing out are not in it.

Source: `benchmark` and `main_async` of vllm/benchmarks/serve.py, vLLM 0.33.0; of steps
`_log_iteration_details` of vllm/v1/metrics/loggers.py and `capture_iteration_details` of
vllm/v1/engine/core.py, vLLM 0.32.0.
Not covered: pooling models, which have no tokens to time; step lines of releases that do not write
the cache's usage.
"""

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from pydantic import Field, ValidationError

from tuner.engines.metrics.benchmark_result import CommonResult, document, first_problem
from tuner.engines.metrics.benchmark_run import BenchmarkRun
from tuner.engines.metrics.observed import RequestRecord, StepRecord

_CLIENT = "vllm bench serve"
STARTED: Final = re.compile(
    r"Initializing a V1 LLM engine \(v(?P<release>[^)]+)\) with config: model='(?P<model>[^']*)'"
)
CACHE: Final = re.compile(r"KV cache size: (?P<tokens>[\d,]+) tokens")
_STEP: Final = re.compile(
    r"(?:(?P<at>\d\d-\d\d \d\d:\d\d:\d\d) .*)?Engine (?P<rank>\d+): Iteration\((?P<number>\d+)\): "
    r"(?P<prompts>\d+) context requests, (?P<prompt_tokens>\d+) context tokens, "
    r"(?P<running>\d+) generation requests, \d+ generation tokens, "
    r"iteration elapsed time: (?P<ms>[\d.]+) ms(?P<dummy> \(dummy\))?, "
    r"\w+ KV cache usage: (?P<cache>[\d.]+)%"
)
_OLD_STEP: Final = re.compile(r"Iteration\(\d+\): \d+ context requests")


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


def logged_step(line: str) -> StepRecord | None:
    """Return the step of a line of a server's log; None of any other line, and of a dummy step.

    Raises:
        ValueError: it is a step of a release that does not write what is needed of it.
    """
    match = _STEP.search(line)
    if match is None:
        if _OLD_STEP.search(line):
            raise ValueError(
                "steps without the cache's usage, as vLLM before 0.27 logs them; upgrade the"
                " server, or give a log of requests"
            )
        return None
    said = match.groupdict()
    if said["dummy"]:
        return None
    # A leap year, as the lines have none.
    at = datetime.strptime(f"2024-{said['at']}", "%Y-%m-%d %H:%M:%S") if said["at"] else None
    return StepRecord(
        seconds=float(said["ms"]) * 1e-3,
        prompts=int(said["prompts"]),
        prompt_tokens=int(said["prompt_tokens"]),
        running=int(said["running"]),
        cache_ratio=float(said["cache"]) * 1e-2,
        number=int(said["number"]),
        rank=said["rank"],
        at_s=None if at is None else at.timestamp(),
    )


def detailed_requests(values: Mapping[str, Any]) -> Iterator[RequestRecord]:
    """Yield the completed requests of a detailed result; times by the client's clock.

    Raises:
        ValueError: the result has no details.
    """
    names = ("start_times", "input_lens", "output_lens", "ttfts", "itls")
    if lacking := [name for name in names if not values.get(name)]:
        raise ValueError(
            f"a summary without {', '.join(lacking)}; run the client with --save-detailed"
        )
    errors = values.get("errors") or [""] * len(values["ttfts"])
    columns = [values[name] for name in names]
    for arrival_s, inputs, outputs, ttft_s, gaps, error in zip(*columns, errors, strict=True):
        if not error and outputs:
            yield RequestRecord(
                arrival_s=arrival_s,
                input_tokens=inputs,
                output_tokens=outputs,
                ttft_s=ttft_s,
                end_s=arrival_s + ttft_s + sum(gaps),
            )
