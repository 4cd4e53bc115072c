"""Factors on latencies: kept only as far as models agree."""

from dataclasses import replace

import pytest

from tests.tuner.decoders import DEEPSEEK_V3, LLAMA_8B, LLAMA_70B, QWEN3_32B
from tuner.backtest.serving.launches import PublishedLaunch, parse_launch
from tuner.backtest.serving.prediction import MeanLatency
from tuner.backtest.serving.residuals import apply_residuals
from tuner.backtest.serving.scores import Pair
from tuner.calibrate.serving import fit, held_out
from tuner.costs.serve.decoder import Decoder

CELLS = {
    "silicon_data_source": "db-dump/1; silicon_concurrency=8",
    "harness": "inferencex",
    "backend": "vllm",
    "model_path": "meta-llama/Llama-3.1-70B",
    "system": "h200_sxm",
    "precision": "fp8",
    "mode": "agg",
    "isl": "1024",
    "osl": "128",
    "tp_size": "4",
    "silicon_ttft_ms": "100",
    "silicon_tpot_ms": "10",
}


def launch(decoder: Decoder) -> PublishedLaunch:
    return replace(parse_launch(CELLS, number=1), decoder=decoder)


def pairs(ratio_of: dict[str, float], *, each: int = 5) -> list[Pair]:
    """Launches of models that take so much of what is predicted."""
    decoders = {one.name: one for one in (DEEPSEEK_V3, LLAMA_8B, LLAMA_70B, QWEN3_32B)}
    return [
        Pair(
            launch=launch(decoders[name]),
            latency=MeanLatency(ttft_s=0.1 / ratio, tpot_s=0.01 / ratio),
        )
        for name, ratio in ratio_of.items()
        for _ in range(each)
    ]


def test_models_that_agree_move_the_factor_and_a_model_is_not_its_own_judge() -> None:
    result = pairs({"llama-3.1-8b": 1.5, "llama-3.1-70b": 1.5, "qwen3-32b": 1.5})
    # log 1.5 = 0.405 against a least spread of 0.05: kept by 1 - 0.0152.
    factor = fit(result, origin="here").factors["vllm|inferencex"]
    assert factor.tpot == pytest.approx(1.5 ** (1 - (0.05 / 0.405465) ** 2))
    for pair in held_out(result):
        assert pair.latency.tpot_s == pytest.approx(0.01, rel=0.02)


def test_models_that_disagree_leave_predictions_alone() -> None:
    result = pairs({"llama-3.1-8b": 0.7, "llama-3.1-70b": 1.0, "qwen3-32b": 1.4})
    assert fit(result, origin="here").factors["vllm|inferencex"].tpot == 1.0


def test_one_model_alone_says_nothing_of_others() -> None:
    result = pairs({"llama-3.1-8b": 2.0})
    assert fit(result, origin="here").factors["vllm|inferencex"].ttft == 1.0
    assert [pair.latency for pair in held_out(result)] == [pair.latency for pair in result]


def test_a_factor_is_applied_to_its_engine_alone() -> None:
    result = pairs({"llama-3.1-8b": 1.5, "llama-3.1-70b": 1.5})
    residuals = fit(result, origin="here")
    before = result[0]
    assert apply_residuals(before.latency, before.launch, residuals).tpot_s > before.latency.tpot_s
    other = replace(
        before.launch, engine=parse_launch({**CELLS, "backend": "sglang"}, number=1).engine
    )
    assert apply_residuals(before.latency, other, residuals) == before.latency
