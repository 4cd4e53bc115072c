"""Traffic on one kind of instance: closed loops, prompts of any length, what is said of them."""

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from tuner.cli.serving_estimate_text import serving_estimate_text
from tuner.errors import TunerError

Made = Callable[..., Any]
STARTS = {
    "vllm": ("vllm serve m -tp 4", "vllm serve m -tp 4 --max-num-batched-tokens 512"),
    "sglang": ("sglang serve m --tp 4", "sglang serve m --tp 4 --disaggregation-mode prefill"),
    "trtllm": ("trtllm-serve serve m --tp_size 4 --max_num_tokens 8192",),
}


def test_prefill_alone_and_prompts_longer_than_a_step_are_estimated(deployment: Made) -> None:
    for inputs, outputs in ((7000, 1), (28_000, 1), (30_000, 8)):
        made = deployment(
            traffic=f"{{concurrency: 4, input_tokens: {inputs}, output_tokens: {outputs}}}",
            slo="{}",
        )
        for start in STARTS["vllm"]:
            result = made.estimate(start)
            assert result.load is not None
            assert (result.load.tpot_s is None) == (outputs == 1)
            # Four requests are in the system, and prompts are what takes their time.
            further_s = 0.0 if outputs == 1 else (outputs - 1) * result.load.tpot_s.mean
            each_s = result.load.ttft_s.mean + further_s
            assert result.load.requests_per_s * each_s == pytest.approx(4, rel=0.2)
            assert result.load.requests_per_s == pytest.approx(result.load.capacity_per_s, rel=0.1)


def test_whole_prompts_that_no_step_holds_do_not_fit_and_chunks_do(deployment: Made) -> None:
    traffic = "{concurrency: 4, input_tokens: 20000, output_tokens: 100}"
    result = deployment(engine="trtllm", traffic=traffic, slo="{}").estimate(STARTS["trtllm"][0])
    assert not result.fits
    assert "prompts of 20000 tokens are refused" in result.misfit
    assert any(change.lines == ("enable_chunked_prefill: true",) for change in result.changes), [
        change.what for change in result.changes
    ]


def test_a_closed_loop_keeps_its_requests_in_both_halves_of_a_deployment(deployment: Made) -> None:
    for role in ("prefill", "decode"):
        for slo in ("{}", "{ttft: {p90: 1s}, tpot: {p90: 50ms}}"):
            made = deployment(
                engine="sglang",
                traffic="{concurrency: 50, input_tokens: 2000, output_tokens: 100}",
                slo=slo,
            )
            result = made.estimate(f"sglang serve m --tp 4 --disaggregation-mode {role}")
            load = result.load
            own_s = load.ttft_s.mean if role == "prefill" else 99 * load.tpot_s.mean
            # Little's law, the first burst and the last requests aside.
            assert load.requests_per_s * (own_s + load.other_half_s) == pytest.approx(50, rel=0.15)
            assert load.keeps_up
            assert any("a closed loop of 50 is in both halves" in note for note in result.notes)


def test_more_requests_at_once_wait_longer_and_not_for_a_rate_that_nobody_stated(
    deployment: Made,
) -> None:
    waits = []
    for concurrency in (1, 50, 100, 400):
        made = deployment(
            engine="sglang",
            slo="{}",
            traffic=f"{{concurrency: {concurrency}, input_tokens: 4000, output_tokens: 20}}",
        )
        load = made.estimate("sglang serve m --tp 4 --disaggregation-mode prefill").load
        waits.append(load.ttft_s.mean)
        assert load.requests_per_s <= load.capacity_per_s
    assert waits == sorted(waits)
    # Most of 400 requests wait for their prompts at the rate of the instance.
    assert waits[-1] == pytest.approx(400 / load.capacity_per_s, rel=0.35)


def test_goodput_and_slos_are_named_where_one_is_stated(deployment: Made) -> None:
    traffic = "{concurrency: 8, input_tokens: 2000, output_tokens: 100}"
    for slo, is_stated in (("{}", False), ("{ttft: {p90: 1s}}", True)):
        result = deployment(traffic=traffic, slo=slo).estimate("vllm serve m -tp 4")
        text = serving_estimate_text(result)
        assert ("goodput" in text) == ("SLO" in text) == result.has_slo == is_stated
        assert "requests/s per device" in text


def test_random_traffic_is_estimated_or_refused_in_a_line(deployment: Made) -> None:
    for seed in range(8):
        draw = random.Random(seed)
        inputs, outputs = (round(2 ** draw.uniform(0, most)) for most in (21, 16))
        load = draw.choice((f"concurrency: {round(2 ** draw.uniform(0, 12))}", "rate: 0.01/s"))
        engine = draw.choice(sorted(STARTS))
        slo = draw.choice(("{}", "{ttft: {p90: 1s}, tpot: {p90: 50ms}}"))
        traffic = f"{{{load}, input_tokens: {inputs}, output_tokens: {outputs}}}"
        with contextlib.suppress(TunerError):  # Such as requests longer than the model takes.
            made = deployment(engine=engine, traffic=traffic, slo=slo)
            serving_estimate_text(made.estimate(draw.choice(STARTS[engine])))
