"""Tensor ranks that share the positions of a cache, and splits without a price."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.rows import Failures, each_row
from tuner.errors import SpecError
from tuner.estimate.serving.instance import build_inputs, price_option
from tuner.goals.serve_plan import price_serving_pool

Made = Callable[..., Any]
KIMI = (
    "vllm serve m -tp 8 --gpu-memory-utilization 0.94 --max-model-len 262144"
    " --max-num-batched-tokens 8192 --max-num-seqs 128 --kv-cache-dtype fp8"
)
MTP = """ --speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'"""
PRO = {
    "device": "rtx-pro-6000",
    "nodes": 1,
    "slo": "{}",
    "traffic": "{concurrency: 8, input_tokens: 8000, output_tokens: 1000}",
}


def test_equal_keys_of_tensor_ranks_are_kept_once_over_context_ranks(
    deployment: Made, failures: Failures
) -> None:
    # Start-up logs of vLLM 0.20 on 8 RTX PRO 6000: GLM-5.1 with MTP keeps 635,520 tokens over 2
    # ranks and 1,271,040 over 4 in equal memory, 340,096 (19.47 of 19.55 GiB) over 1 without MTP,
    # 680,192 over 2, 1,360,384 over 4 and 2,720,768 over 8.
    for model, extra in (("glm-5", MTP), ("glm-5", ""), ("kimi-k2.5", "")):
        made = deployment(model=model, extra="quantization: int4", **PRO)
        shorter = KIMI.replace("262144", "131072") + extra
        one = made.predict(shorter)
        for ranks in (2, 4, 8):
            with failures.of(model, extra, ranks):
                result = made.predict(f"{shorter} -dcp {ranks}")
                tokens = pytest.approx(ranks * one.logged_kv_tokens, rel=1e-3)
                assert result.logged_kv_tokens == tokens
                assert result.memory == one.memory
                assert result.instance.dcp == ranks


@each_row(("ranks", "logged"), ((1, 437_264), (4, 1_686_656), (8, 3_267_968)))
def test_tokens_of_kimi_are_those_of_its_start_up_logs(
    deployment: Made, ranks: int, logged: int
) -> None:
    made = deployment(model="kimi-k2.5", extra="quantization: int4", **PRO)
    tokens = made.predict(f"{KIMI} -dcp {ranks}").logged_kv_tokens
    assert tokens == pytest.approx(logged, rel=0.16), ranks


def test_a_rank_attends_over_its_own_positions_and_advice_keeps_or_changes_that(
    deployment: Made,
) -> None:
    made = deployment(model="kimi-k2.5", extra="quantization: int4", **PRO)
    serving_pool = price_serving_pool(made.spec.cluster.pools[0], ())

    def steps(text: str) -> tuple[list[float], list[float]]:
        launch = made.read(text)
        inputs = build_inputs(launch, spec=made.spec, serving_pool=serving_pool)
        iteration = price_option(inputs, launch.setting).iteration
        n_Q = np.array([1.0, 64.0])
        long_Q = iteration.decode_s(n_Q, np.full(2, 80_000.0))
        return iteration.context_s(n_Q).tolist(), long_Q.tolist()

    passed, short = steps(KIMI)
    assert passed == [0.0, 0.0]
    passed, long = steps(f"{KIMI} -dcp 8")
    # One sequence without a past takes 10.9 ms a step over 1 rank and 13.2 ms over 8.
    assert passed[0] == pytest.approx(2.3e-3, rel=0.3)
    # 64 sequences of 83,000 tokens: 318 tokens/s over 1 rank, 509 over 8.
    assert long[1] < short[1]
    exchanged, _ = steps(f"{KIMI} -dcp 8 --dcp-comm-backend a2a")
    assert exchanged[0] < passed[0]
    result = made.estimate(f"{KIMI} -dcp 8")
    fewer = next(one for one in result.changes if one.what == "DCP 8 -> 4")
    assert fewer.lines == ("--decode-context-parallel-size 4",)
    halved = next(one for one in result.changes if one.what.startswith("TP 8 -> 4, DP 1 -> 2"))
    assert halved.instance.dcp == 4


@each_row(
    ("model", "command", "words"),
    (
        ("kimi-k2.5", "vllm serve m -tp 8 -dcp 3", "8 keep the same keys"),
        ("kimi-k2.5", "vllm serve m -tp 8 -dcp 16", "the nearest is 8"),
        ("mixtral-8x7b", "vllm serve m -tp 8 -dcp 2", "1 keep the same keys"),
        ("gpt-oss-120b", "vllm serve m -tp 8 -dcp 2", "the nearest is 1"),
        ("qwen3-235b-a22b", "vllm serve m -tp 8 -dcp 4", "the nearest is 2"),
        ("kimi-k2.5", "vllm serve m -tp 8 -dcp 8 --enable-dbo", "leave one of them out"),
        (
            "kimi-k2.5",
            "vllm serve m -tp 8 -dcp 8 --block-size 64 --cp-kv-cache-interleave-size 48",
            "the nearest that does is 32|the nearest that does is 64",
        ),
        ("kimi-k2.5", "sglang serve --model-path m --tp 8 --dcp-size 3", "the nearest is"),
    ),
)
def test_keys_that_differ_share_no_positions(
    deployment: Made, model: str, command: str, words: str
) -> None:
    # gpt-oss has windows, Mixtral 8 key heads, Qwen3-235B 4.
    with pytest.raises(SpecError, match=words):
        deployment(model=model).read(command)


def test_grouped_keys_share_what_tensor_ranks_would_copy(deployment: Made) -> None:
    made = deployment(model="qwen3-235b-a22b", device="h200-sxm", nodes=1)
    one = made.predict("vllm serve m -tp 8 --max-model-len 32768")
    two = made.predict("vllm serve m -tp 8 --max-model-len 32768 -dcp 2")
    assert two.kv_tokens == pytest.approx(2 * one.kv_tokens, rel=1e-3)


def test_sglang_keeps_drafts_and_indexer_keys_whole(deployment: Made) -> None:
    start = "python -m sglang.launch_server --model-path m --tp 8 --mem-fraction-static 0.9"
    draft = " --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1"
    draft += " --speculative-num-draft-tokens 4"
    dense = {"model": "kimi-k2", "device": "h200-sxm", "nodes": 1, "engine": "sglang"}
    made = deployment(**dense, slo="{}", extra="quantization: fp8_block")
    plain = [made.predict(f"{start} {text}").kv_tokens for text in ("", "--dcp-size 8")]
    assert plain[1] == pytest.approx(8 * plain[0], rel=1e-3)
    drafted = [made.predict(f"{start}{draft} {text}").kv_tokens for text in ("", "--dcp-size 8")]
    # 61 layers over 8 ranks, and one whole layer.
    assert drafted[1] == pytest.approx(drafted[0] * 62 / (61 / 8 + 1), rel=1e-3)


def test_splits_without_a_price_are_refused_by_name(deployment: Made, failures: Failures) -> None:
    for command, words in (
        ("vllm serve m -tp 4 -pcp 2", "the nearest is 1"),
        ("python -m dynamo.vllm --model m -tp 4 --prefill-context-parallel-size 2", "nearest is 1"),
        ("sglang serve --model-path m --tp 8 --attn-cp-size 4", "the nearest is 1"),
        ("sglang serve --model-path m --tp 8 --moe-dp-size 2", "the nearest is 1"),
        *(
            (f"sglang serve --model-path m --tp 8 --enable-prefill-cp{value}", "leave it out")
            for value in ("", " 1", "=1", " true", "=True")
        ),
        ("sglang serve --model-path m --tp 8 --enable-kv-cache-sharding", "leave it out"),
        ("trtllm-serve m --tp_size 4 --cp_size 2", "the nearest is 1"),
    ):
        with failures.of(command), pytest.raises(SpecError, match=f"has no price; .*{words}"):
            deployment().read(command)
    assert deployment().read("vllm serve m -tp 4 -pcp 1").setting.degrees.context == 1
    for off in ("--attn-cp-size 1", "--enable-prefill-cp false", "--enable-prefill-cp=0"):
        assert deployment().read(f"sglang serve --model-path m {off}").engine == "sglang"


def test_two_batch_overlap_is_no_change_of_a_launch_that_may_not_have_it(deployment: Made) -> None:
    made = deployment(
        model="deepseek-v3", device="h200-sxm", nodes=1, extra="quantization: fp8_block"
    )
    start = "vllm serve m -tp 4 -dp 2 --enable-expert-parallel --max-model-len 8192"
    start += " --all2all-backend deepep_low_latency"
    halves = "with two-batch overlap"
    assert halves in {one.what for one in made.estimate(start).changes}
    assert halves not in {one.what for one in made.estimate(f"{start} -dcp 2").changes}
    with pytest.raises(SpecError, match="leave one of them out"):
        made.read(f"{start} -dcp 2 --enable-dbo")
