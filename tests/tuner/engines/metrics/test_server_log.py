"""Logs of servers, by small samples of each format."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.rows import Failures
from tuner.engines.metrics.observed import RequestRecord, StepRecord
from tuner.engines.metrics.server_log import read_server_logs, with_gaps
from tuner.errors import SpecError

VLLM = """\
(EngineCore_DP0 pid=61) INFO 11-30 23:59:50 [core.py:134] Initializing a V1 LLM engine \
(v0.32.0+cpu) with config: model='out/model', speculative_config=None, tokenizer='out/model'
(EngineCore_DP0 pid=61) INFO 11-30 23:59:51 [kv_cache_utils.py:2328] CPU KV cache size: \
16,384 tokens, block size 128
(APIServer pid=7) INFO 11-30 23:59:52 [loggers.py:198] Engine 000: Iteration(0): 2 context \
requests, 300 context tokens, 0 generation requests, 0 generation tokens, iteration elapsed time: \
50.25 ms, CPU KV cache usage: 3.1%
(APIServer pid=7) INFO 11-30 23:59:52 [loggers.py:271] Engine 000: Avg prompt throughput: 30.0
(APIServer pid=7) INFO 11-30 23:59:53 [loggers.py:198] Engine 000: Iteration(1): 0 context \
requests, 0 context tokens, 0 generation requests, 0 generation tokens, iteration elapsed time: \
1.00 ms (dummy), CPU KV cache usage: 3.1%
(APIServer pid=7) INFO 12-01 00:00:12 [loggers.py:198] Engine 000: Iteration(2): 0 context \
requests, 0 context tokens, 2 generation requests, 2 generation tokens, iteration elapsed time: \
8.50 ms, CPU KV cache usage: 3.2%, encoder inputs: 1, encoder output embeddings: 2
"""
PASSED: dict[str, Any] = {
    "version": 1,
    "worker_id": "694d",
    "dp_rank": 1,
    "counter_id": 9,
    "wall_time": 0.0123,
    "scheduled_requests": {
        "num_prefill_requests": 1,
        "sum_prefill_tokens": 512,
        "var_prefill_length": 0.0,
        "sum_prefill_kv_tokens": 1024,
        "num_decode_requests": 3,
        "sum_decode_kv_tokens": 900,
        "var_decode_kv_tokens": 2.0,
    },
    "queued_requests": {"num_prefill_requests": 0},
}
IDLE = {
    **PASSED,
    "counter_id": 10,
    "wall_time": 0.0,
    "scheduled_requests": dict.fromkeys(
        PASSED["scheduled_requests"],
        0,
    ),
}
BENCH = {
    "date": "20261130-101500",
    "model_id": "out/model",
    "completed": 1,
    "failed": 1,
    "input_lens": [256, 40],
    "output_lens": [3, 0],
    "start_times": [1000.5, 1001.0],
    "ttfts": [0.25, 0.0],
    "itls": [[0.02, 0.03], []],
    "generated_texts": ["a b c", ""],
    "errors": ["", "Connection reset"],
    "mean_ttft_ms": 250.0,
}
AIPERF: dict[str, Any] = {
    "metadata": {
        "session_num": 45,
        "x_request_id": "7609",
        "request_start_ns": 1_000_500_000_000,
        "request_end_ns": 1_000_800_000_000,
        "worker_id": "worker_3",
        "benchmark_phase": "profiling",
        "was_cancelled": False,
    },
    "metrics": {
        "input_sequence_length": {"value": 256, "unit": "tokens"},
        "time_to_first_token": {"value": 250.0, "unit": "ms"},
        "output_sequence_length": {"value": 3, "unit": "tokens"},
    },
    "error": None,
}
FAILED = {
    **AIPERF,
    "metrics": {"error_isl": {"value": 5, "unit": "tokens"}},
    "error": {"code": 499},
}
WARM = {**AIPERF, "metadata": {**AIPERF["metadata"], "benchmark_phase": "warmup"}}
SGLANG = {
    "request_parameters": '{"sampling_params": {"max_new_tokens": 3}}',
    "id": "b2",
    "prompt_tokens": 256,
    "completion_tokens": 3,
    "cached_tokens": 64,
    "e2e_latency": 0.3,
    "first_token_latency": 0.25,
    "request_received_ts": 1000.5,
    "queue_time": 0.001,
}
CSV = "arrival_s,client,input_tokens,output_tokens,ttft_s,end_s\n1000.5,7,256,3,0.25,1000.8\n"
REQUEST = RequestRecord(
    arrival_s=1000.5, input_tokens=256, output_tokens=3, ttft_s=0.25, end_s=1000.8
)


def written(folder: Path, text: str) -> Path:
    path = folder / "log.txt"
    path.write_text(text)
    return path


def lines(*values: object) -> str:
    return "\n".join(json.dumps(value) for value in values) + "\n"


def test_steps_of_vllm_are_read_with_what_its_clock_adds(tmp_path: Path) -> None:
    log = read_server_logs([written(tmp_path, VLLM)])
    assert [step.prompt_tokens for step in log.steps] == [300, 0]
    first, second = log.steps
    assert first.seconds == pytest.approx(0.05025)
    assert (first.prompts, first.running, second.running) == (2, 0, 2)
    assert second.cache_ratio == pytest.approx(0.032)
    assert log.cache_tokens == 16_384
    assert set(log.models) == {"out/model"}
    assert set(log.releases) == {"0.32.0"}
    # 20 s by the clock, over midnight, for one step of 8.5 ms: the rest was between them.
    assert log.gap_s == pytest.approx(20.0 - 0.0085)
    assert with_gaps(log)[1].seconds == pytest.approx(20.0)


def test_forward_passes_are_read_without_heartbeats(tmp_path: Path) -> None:
    log = read_server_logs([written(tmp_path, lines(PASSED, IDLE))])
    assert log.steps == [
        StepRecord(
            seconds=0.0123,
            prompts=1,
            prompt_tokens=512,
            before_tokens=1024,
            running=3,
            past_tokens=900.0,
            number=9,
            rank="694d 1",
        )
    ]


def test_every_list_of_requests_says_the_same(tmp_path: Path) -> None:
    failures = Failures()
    texts = {
        "bench": lines(BENCH),
        "indented": json.dumps(BENCH, indent=2),
        "aiperf": lines(WARM, FAILED, AIPERF),
        "sglang": lines(SGLANG),
        "csv": CSV,
    }
    for name, text in texts.items():
        with failures.of(name):
            (request,) = read_server_logs([written(tmp_path, text)]).requests
            assert request.cached_tokens == (64 if name == "sglang" else None)
            for field in ("arrival_s", "input_tokens", "output_tokens", "ttft_s", "end_s"):
                assert getattr(request, field) == pytest.approx(getattr(REQUEST, field))
    failures.check()


def test_many_steps_are_thinned_and_counted(tmp_path: Path) -> None:
    steps = [{**PASSED, "counter_id": number} for number in range(20_000)]
    log = read_server_logs([written(tmp_path, lines(*steps))])
    assert log.num_steps == 20_000
    assert 4096 <= len(log.steps) <= 8192
    assert log.step_s == pytest.approx(20_000 * 0.0123)
    numbers = [step.number for step in log.steps]
    assert len({after - before for before, after in itertools.pairwise(numbers)}) == 1


def test_scrapes_give_means_between_the_first_and_the_last(tmp_path: Path) -> None:
    text = "# HELP vllm:time_to_first_token_seconds Histogram of time to first token.\n"
    for total, count, tokens in ((1.0, 4, 100), (4.0, 10, 400)):
        labels = '{engine="0",model_name="m"}'
        text += f"vllm:time_to_first_token_seconds_sum{labels} {total}\n"
        text += f"vllm:time_to_first_token_seconds_count{labels} {count}\n"
        text += f"vllm:generation_tokens_total{labels} {tokens} 1395066363000\n"
    scrapes = read_server_logs([written(tmp_path, text)]).scrapes
    assert scrapes.mean_s("time_to_first_token_seconds") == pytest.approx(0.5)
    assert scrapes.growth("generation_tokens_total") == 300
    assert scrapes.models == {"m"}


def test_files_that_hold_something_else_are_refused(tmp_path: Path) -> None:
    failures = Failures()
    texts = {
        "AIPerf; its requests are in": json.dumps({"time_to_first_token": {"avg": 1}}, indent=2),
        "a summary without start_times": lines({**BENCH, "start_times": []}),
        "a request without first_token_latency": lines({**SGLANG, "first_token_latency": None}),
        "version 2": lines({**PASSED, "version": 2}),
        "lacks 'dp_rank'": lines({k: v for k, v in PASSED.items() if k != "dp_rank"}),
        "JSON of no known format": lines({"a": 1}),
        "times go back": CSV.replace("1000.8", "1000.6"),
        "no total of vLLM or SGLang": "# HELP up\nup 1\n",
        "neither steps, requests nor scrapes": "",
        "No such file": "",
    }
    for words, text in texts.items():
        with failures.of(words):
            path = written(tmp_path, text)
            if words.startswith("No such"):
                path = tmp_path / "none"
            with pytest.raises(SpecError, match=words.replace("(", r"\(")):
                read_server_logs([path])
    failures.check()
