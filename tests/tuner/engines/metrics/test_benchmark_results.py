"""Clients' results, as the clients themselves wrote them against the tiny server, cut to size.

The server waits 20 ms for the first and 2 ms for each further token, and fails every tenth request
of 30 (tests/tuner/verify/deployments/tiny_server.py): 27 completed, 3 failed.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rows import each_row
from tuner.engines.metrics import aiperf
from tuner.engines.metrics.benchmark_result import BenchmarkReader
from tuner.engines.metrics.benchmark_run import BenchmarkRun
from tuner.engines.sglang import metrics as sglang_benchmark
from tuner.engines.vllm import metrics as vllm_benchmark

LOGS = Path(__file__).parent / "logs"
TIMES = {
    "mean_ttft_ms": 22.128630851511844,
    "median_ttft_ms": 22.09006699558813,
    "p90_ttft_ms": 22.638186599942856,
    "p99_ttft_ms": 22.967710700322638,
    "mean_tpot_ms": 2.22824806875362,
    "median_tpot_ms": 2.2210541428648867,
    "p90_tpot_ms": 2.2572314855226847,
    "p99_tpot_ms": 2.268175411424766,
}
VLLM: dict[str, Any] = {
    "date": "20261120-192230",
    "endpoint_type": "openai",
    "backend": "openai",
    "label": None,
    "num_prompts": 30,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": 4,
    "duration": 0.2671140669990564,
    "completed": 27,
    "failed": 3,
    "total_input_tokens": 540,
    "total_output_tokens": 216,
    "request_throughput": 101.08041221241778,
    "request_goodput": 101.08041221241778,
    "output_throughput": 808.6432976993423,
    "std_ttft_ms": 0.4959277977788304,
    "p50_ttft_ms": 22.09006699558813,
    **TIMES,
}
SGLANG: dict[str, Any] = {
    "tag": None,
    "backend": "sglang-oai",
    "request_rate": float("inf"),
    "server_info": {"internal_states": [{}]},
    "duration": 0.2884445119998418,
    "completed": 27,
    "total_input_tokens": 540,
    "total_output_tokens": 216,
    "total_output_tokens_retokenized": 216,
    "request_throughput": 93.60552507240911,
    "output_throughput": 748.8442005792729,
    "accept_length": None,
    **TIMES,
}
SGLANG_GOODPUT = {
    "goodput_slos_ms": {"ttft": 2000.0, "tpot": 50.0},
    "request_goodput": 93.60552507240911,
    "slo_attainment": 0.9,
    "slo_attainment_by_metric": {"ttft": 0.9, "tpot": 0.9},
}
AIPERF: dict[str, Any] = {
    "schema_version": "1.4",
    "aiperf_version": "0.13.0",
    "request_throughput": {"unit": "requests/sec", "avg": 78.51491355742107},
    "request_count": {"unit": "requests", "avg": 27.0},
    "error_request_count": {"unit": "requests", "avg": 3.0},
    "time_to_first_token": {
        "unit": "ms",
        "avg": 23.364168111111113,
        "p50": 23.190188,
        "p90": 24.634141,
        "p99": 26.09831824,
    },
    "inter_token_latency": {"unit": "ms", "avg": 2.5, "p50": 2.4, "p90": 2.9, "p99": 3.2},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 628.1193084593685},
    "output_sequence_length": {"unit": "tokens", "avg": 8.0},
    "input_sequence_length": {"unit": "tokens", "avg": 20.0},
    "goodput": {"unit": "requests/sec", "avg": 78.51491355742107},
    "benchmark_duration": {"unit": "sec", "avg": 0.33962752},
    "was_cancelled": False,
    "is_complete": True,
    "warmup_metrics": {"time_to_first_token": {"unit": "ms", "avg": 99.0}},
}


def read(reader: BenchmarkReader, values: dict[str, Any]) -> BenchmarkRun:
    return reader(json.dumps(values).encode())


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def test_vllms_client_tells_seconds_and_failures() -> None:
    result = read(vllm_benchmark.read, VLLM)
    assert (result.completed, result.failed) == (27, 3)
    assert result.ttft_s.mean == pytest.approx(0.022128630851511844)
    assert result.ttft_s.p90 == pytest.approx(0.022638186599942856)
    assert result.tpot_s.p99 == pytest.approx(0.002268175411424766)
    assert result.goodput_requests_per_s == result.requests_per_s
    # 540 tokens in and 216 out of 27 requests that completed.
    assert (result.mean_input_tokens, result.mean_output_tokens) == (20.0, 8.0)


def test_older_and_appended_results_of_vllms_client_are_read() -> None:
    older = without(VLLM, "failed", "request_goodput", "p90_ttft_ms") | {"request_goodput:": 7.0}
    result = read(vllm_benchmark.read, older)
    assert (result.failed, result.goodput_requests_per_s, result.ttft_s.p90) == (3, 7.0, None)
    assert (
        read(vllm_benchmark.read, VLLM | {"request_goodput": None}).goodput_requests_per_s is None
    )
    lines = [json.dumps(SGLANG | {"completed": number}) for number in (20, 27)]
    assert sglang_benchmark.read(("\n".join(lines) + "\n").encode()).completed == 27


def test_sglangs_client_tells_of_what_it_sent_and_of_the_prefix_cache() -> None:
    # 93.6055 requests/s * 0.288444 s = 27 good ones, 27 / 0.9 = 30 sent.
    assert read(sglang_benchmark.read, SGLANG | SGLANG_GOODPUT).failed == 3
    assert read(sglang_benchmark.read, SGLANG).failed is None
    errors = [""] * 27 + ["Bad Request"] * 3
    assert read(sglang_benchmark.read, SGLANG | {"errors": errors}).failed == 3
    report = {"total_prompt_tokens": 540, "total_cached_tokens": 54, "cache_hit_rate_pct": 10.0}
    result = read(sglang_benchmark.read, SGLANG | {"cache_report": report})
    assert result.prefix_hit_ratio == pytest.approx(0.1)


def test_aiperfs_units_are_heeded_and_its_warm_up_is_left_out() -> None:
    result = read(aiperf.read, AIPERF)
    assert (result.completed, result.failed) == (27, 3)
    assert result.ttft_s.mean == pytest.approx(0.023364168111111113)
    assert result.duration_s == pytest.approx(0.33962752)
    assert result.mean_output_tokens == 8.0
    nanoseconds = AIPERF | {"time_to_first_token": {"unit": "ns", "avg": 2.5e7}}
    assert read(aiperf.read, nanoseconds).ttft_s.mean == pytest.approx(0.025)
    # Without an error the metric is not there.
    assert read(aiperf.read, without(AIPERF, "error_request_count")).failed == 0


@each_row(
    ("reader", "values", "said"),
    [
        (vllm_benchmark.read, VLLM | {"completed": 0}, "reports no completed request"),
        (vllm_benchmark.read, VLLM | {"mean_ttft_ms": float("nan")}, "mean_ttft_ms"),
        (vllm_benchmark.read, VLLM | {"duration": 0.0}, "duration"),
        (vllm_benchmark.read, VLLM | {"median_tpot_ms": -1.0}, "greater than or equal to 0"),
        (vllm_benchmark.read, without(VLLM, "median_tpot_ms"), "median_tpot_ms"),
        (sglang_benchmark.read, without(SGLANG, *SGLANG), "reports no completed request"),
        (sglang_benchmark.read, SGLANG | {"errors": "none"}, "errors"),
        (aiperf.read, AIPERF | {"is_complete": False, "incomplete_reason": "stalled"}, "stalled"),
        (aiperf.read, AIPERF | {"was_cancelled": True}, "cancelled"),
        (aiperf.read, without(AIPERF, "inter_token_latency"), "inter_token_latency"),
        (
            aiperf.read,
            AIPERF | {"request_count": {"unit": "requests", "avg": 0.0}},
            "no completed request",
        ),
        (
            aiperf.read,
            AIPERF | {"time_to_first_token": {"unit": "fortnight", "avg": 1.0}},
            "'fortnight' is no unit of time",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    reader: BenchmarkReader, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        read(reader, values)


@each_row("reader", [vllm_benchmark.read, sglang_benchmark.read, aiperf.read])
@each_row("content", [b"", b"\xff\xfe", b"[]", b"[" * 10**6, b'{"a": 1', b"null"])
def test_garbage_is_refused(reader: BenchmarkReader, content: bytes) -> None:
    with pytest.raises(ValueError, match="not the JSON of"):
        reader(content)


def test_a_result_of_a_real_server_is_read_as_it_was_written() -> None:
    run = vllm_benchmark.read((LOGS / "vllm-0.32.0-cpu-bench.json").read_bytes())
    assert (run.completed, run.failed, run.goodput_requests_per_s) == (16, 0, None)
    assert run.ttft_s.mean == pytest.approx(0.202993, rel=1e-4)
    assert run.tpot_s.mean == pytest.approx(0.018515, rel=1e-4)
    assert run.mean_output_tokens == 32.0
