"""The benchmark drives the traffic that was planned for."""

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

from tests.rows import each_row
from tests.tuner.engines.serving.testing import aggregated, routed, sample_serving
from tests.tuner.engines.testing import texts_of, write_emitted
from tuner.engines.launchers.benchmark import benchmark_files, num_requests
from tuner.engines.serve_writers import emit_serving
from tuner.spec.model import ModelSpec

OPEN = {"rate": 20.0, "input_tokens": 4000, "output_tokens": 500}


def _words(model: ModelSpec, name: str, **traffic: Any) -> list[str]:
    verified = sample_serving(model, aggregated(), goal={"traffic": traffic} if traffic else None)
    (text,) = (file.text for file in benchmark_files(verified) if str(file.path) == name)
    _, _, command = text.partition("\nexec ")
    return shlex.split(command.replace("\\\n", " "))


def _after(words: list[str], option: str) -> str | None:
    """Return the words after an option, up to the next one; None without it."""
    if option not in words:
        return None
    after = words[words.index(option) + 1 :]
    return " ".join(itertools.takewhile(lambda word: not word.startswith("--"), after))


GAMMA = OPEN | {"arrival": {"kind": "gamma", "cv": 2.0}}
COMMON = OPEN | {"prefix_hit": 0.25, "prefix_scope": "common"}


@each_row(
    ("name", "traffic", "expected"),
    (
        # A closed loop is bounded and not paced.
        (
            "bench_vllm.sh",
            {},
            {
                "--max-concurrency": "256",
                "--request-rate": "inf",
                "--random-input-len": "4000",
                "--random-output-len": "1000",
                "--goodput": "ttft:2000 tpot:50",
            },
        ),
        (
            "bench_aiperf.sh",
            {},
            {
                "--concurrency": "256",
                "--request-rate": None,
                "--goodput": "time_to_first_token:2000 inter_token_latency:50",
            },
        ),
        # cv 2: shape 1 / 4.
        ("bench_vllm.sh", GAMMA, {"--burstiness": "0.25", "--request-rate": "20.0"}),
        (
            "bench_aiperf.sh",
            GAMMA,
            {"--arrival-pattern": "gamma", "--arrival-smoothness": "0.25"},
        ),
        ("bench_aiperf.sh", OPEN, {"--arrival-pattern": "poisson"}),
        (
            "bench_aiperf.sh",
            OPEN | {"arrival": {"kind": "constant"}},
            {"--arrival-pattern": "constant"},
        ),
        ("bench_vllm.sh", OPEN | {"arrival": {"kind": "constant"}}, {"--burstiness": "inf"}),
        ("bench_vllm.sh", COMMON, {"--random-prefix-len": "1000", "--random-input-len": "3000"}),
        (
            "bench_aiperf.sh",
            COMMON,
            {"--prefix-prompt-length": "1000", "--num-prefix-prompts": "1"},
        ),
        # 800 to 1200: 1000 (1 - 0.2) to 1000 (1 + 0.2).
        (
            "bench_vllm.sh",
            OPEN | {"input_tokens": {"kind": "uniform", "low": 800, "high": 1200}},
            {
                "--random-input-len": "1000",
                "--random-range-ratio": '{"input": 0.2, "output": 0.0}',
            },
        ),
        # SGLang's gateway answers token ids with 422. Sessions of four, the first of which finds
        # nothing: 4,000 * 0.6 * 4 / 3.
        (
            "bench_vllm.sh",
            OPEN | {"prefix_hit": 0.6},
            {
                "--dataset-name": "prefix_repetition",
                "--prefix-repetition-prefix-len": "3200",
                "--prefix-repetition-suffix-len": "800",
            },
        ),
    ),
)
def test_traffic_becomes_options(
    deepseek: ModelSpec, name: str, traffic: dict[str, Any], expected: dict[str, str | None]
) -> None:
    words = _words(deepseek, name, **traffic)
    assert {option: _after(words, option) for option in expected} == expected


def test_the_files_requests_are_found_beside_the_scripts(
    deepseek: ModelSpec, launch: Path, programs: Any
) -> None:
    traffic = OPEN | {"prefix_hit": 0.6, "arrival": {"kind": "on_off", "on": 2.0, "off": 2.0}}
    verified = sample_serving(deepseek, aggregated(), engine="vllm", goal={"traffic": traffic})
    write_emitted(launch, benchmark_files(verified))
    done = programs.run(str(launch / "bench_vllm.sh"), cwd=launch.parent)
    assert done.code == 0, done.stderr
    argv = programs.argv()
    assert _after(argv, "--dataset-path") == str(launch / "requests.jsonl")
    assert _after(argv, "--timed-trace-sec-multiplier") == "0.001"
    assert "--request-rate" not in argv
    call = programs.called(str(launch / "bench_aiperf.sh"), cwd=launch.parent, log="router.json")
    assert "--fixed-schedule" in call["argv"]
    assert _after(call["argv"], "--input-file") == str(launch / "requests.jsonl")


def test_a_router_of_text_gets_no_token_ids(deepseek: ModelSpec) -> None:
    for traffic, said in (
        ({"trace": "recorded.csv"}, "send traces by bench_aiperf.sh"),
        (OPEN | {"prefix_hit": 0.6}, "Only it sends requests.jsonl"),
    ):
        verified = sample_serving(deepseek, aggregated(), goal={"traffic": traffic})
        texts = texts_of(benchmark_files(verified))
        assert said in " ".join(texts["bench_vllm.sh"].replace("\n# ", " ").split())


def test_traces_are_replayed(deepseek: ModelSpec, launch: Path, programs: Any) -> None:
    verified = sample_serving(deepseek, aggregated(), goal={"traffic": {"trace": "recorded.csv"}})
    write_emitted(launch, benchmark_files(verified))
    without = programs.run(str(launch / "bench_aiperf.sh"), cwd=launch)
    assert "set TRACE to the recorded requests" in without.stderr
    call = programs.called(
        str(launch / "bench_aiperf.sh"), cwd=launch, TRACE="requests.jsonl", log="router.json"
    )
    assert _after(call["argv"], "--input-file") == "requests.jsonl"
    assert "--fixed-schedule" in call["argv"]


def test_vllms_client_replays_traces_whose_prompts_have_hashes(
    deepseek: ModelSpec, launch: Path, programs: Any
) -> None:
    traffic = {"trace": "recorded.csv", "rate": 5.0}
    verified = sample_serving(deepseek, aggregated(), goal={"traffic": traffic})
    write_emitted(launch, benchmark_files(verified))
    assert "stretches the trace to 5 requests/s" in (launch / "bench_vllm.sh").read_text()
    line = '{"timestamp": 0, "input_length": 600, "output_length": 2'
    plain, hashed = launch / "plain.jsonl", launch / "hashed.jsonl"
    plain.write_text(2 * (line + "}\n"))
    hashed.write_text(3 * (line + ', "hash_ids": [1, 2]}\n'))
    script = str(launch / "bench_vllm.sh")
    refused = programs.run(script, cwd=launch, TRACE=str(plain))
    assert refused.code == 2
    assert "has no hash_ids" in refused.stderr
    argv = programs.called(script, cwd=launch, TRACE=str(hashed), SECONDS_EACH="0.002")["argv"]
    assert _after(argv, "--dataset-path") == str(hashed)
    assert _after(argv, "--num-prompts") == "3"
    assert _after(argv, "--timed-trace-sec-multiplier") == "0.002"
    assert "--request-rate" not in argv


def test_runs_are_long_enough_and_send_the_most_that_is_served(deepseek: ModelSpec) -> None:
    closed = sample_serving(deepseek, aggregated())
    # Ten times 256.
    assert num_requests(closed) == 2560
    # Five minutes of 20 requests a second.
    assert num_requests(sample_serving(deepseek, aggregated(), goal={"traffic": OPEN})) == 6000
    finite = {"traffic": {**OPEN, "requests": 600}}
    assert num_requests(sample_serving(deepseek, aggregated(), goal=finite)) == 600
    goal = {"traffic": OPEN, "objective": "rate"}
    verified = sample_serving(deepseek, aggregated(), goal=goal)
    files = {str(file.path): file.text for file in benchmark_files(verified)}
    # As predicted, whatever rate says the traffic's shape.
    assert f"--request-rate {verified.predicted.requests_per_s}" in files["bench_vllm.sh"]
    assert f"--request-rate {verified.predicted.requests_per_s}" in files["bench_aiperf.sh"]


def test_what_to_expect_lies_beside_it(deepseek: ModelSpec) -> None:
    verified = sample_serving(deepseek, aggregated(), waived="not launched")
    (text,) = (file.text for file in benchmark_files(verified) if str(file.path) == "expected.json")
    expected = json.loads(text)
    assert expected["ttft_s"]["p90"] == verified.predicted.ttft_s.p90
    assert expected["tpot_s_band"] == list(verified.predicted.tpot_s_band)
    assert expected["num_devices"] == 16


@each_row(("policy", "is_asked"), (("cache_aware", True), ("round_robin", False)))
def test_servers_tokenize_prompts_for_a_router_that_follows_them(
    *, deepseek: ModelSpec, policy: str, is_asked: bool
) -> None:
    # vllm-router 0.1.17 asks /v1/completions/render, which vLLM refuses without the option.
    verified = sample_serving(deepseek, routed(policy=policy), engine="vllm")
    files = {str(file.path): file.text for file in emit_serving("vllm", verified)}
    assert ("--enable-scale-out" in files["aggregated.sh"]) is is_asked
    graph = sample_serving(deepseek, routed(policy=policy), engine="vllm", emit=("dynamo",))
    texts = "".join(file.text for file in emit_serving("dynamo", graph))
    assert "--enable-scale-out" not in texts
