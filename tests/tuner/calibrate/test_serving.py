"""Factors on latencies: kept only as far as models agree."""

from dataclasses import replace

import pytest

from tuner.backtest.serving.decoders import DEEPSEEK_V3, LLAMA_8B, LLAMA_70B, QWEN3_32B
from tuner.backtest.serving.launches import Launch, launch_of
from tuner.backtest.serving.prediction import Latency
from tuner.backtest.serving.residuals import calibrated
from tuner.backtest.serving.scores import Pair
from tuner.calibrate.serving import after_launches, fit, held_out
from tuner.costs.serving.decoder import Decoder

CELLS = {
    "silicon_data_source": "db-dump/1; silicon_concurrency=8",
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


def launch(decoder: Decoder) -> Launch:
    return replace(launch_of(CELLS, number=1), decoder=decoder)


def pairs(ratio_of: dict[str, float], *, each: int = 5) -> list[Pair]:
    """Launches of models that take so much of what is predicted."""
    decoders = {one.name: one for one in (DEEPSEEK_V3, LLAMA_8B, LLAMA_70B, QWEN3_32B)}
    return [
        Pair(
            launch=launch(decoders[name]),
            latency=Latency(ttft_s=0.1 / ratio, tpot_s=0.01 / ratio),
        )
        for name, ratio in ratio_of.items()
        for _ in range(each)
    ]


def test_models_that_agree_move_the_factor_and_a_model_is_not_its_own_judge() -> None:
    found = pairs({"llama-3.1-8b": 1.5, "llama-3.1-70b": 1.5, "qwen3-32b": 1.5})
    # log 1.5 = 0.405 against a least spread of 0.05: kept by 1 - 0.0152.
    factor = fit(found, origin="here").factors["vllm|inferencex"]
    assert factor.tpot == pytest.approx(1.5 ** (1 - (0.05 / 0.405465) ** 2))
    for pair in held_out(found):
        assert pair.latency.tpot_s == pytest.approx(0.01, rel=0.02)


def test_models_that_disagree_leave_predictions_alone() -> None:
    found = pairs({"llama-3.1-8b": 0.7, "llama-3.1-70b": 1.0, "qwen3-32b": 1.4})
    assert fit(found, origin="here").factors["vllm|inferencex"].tpot == 1.0


def test_one_model_alone_says_nothing_of_others() -> None:
    found = pairs({"llama-3.1-8b": 2.0})
    assert fit(found, origin="here").factors["vllm|inferencex"].ttft == 1.0
    assert [pair.latency for pair in held_out(found)] == [pair.latency for pair in found]


def test_three_launches_of_the_same_take_off_most_of_an_error() -> None:
    found = pairs({"llama-3.1-8b": 2.0}, each=6)
    after = after_launches(found, launches=3, draws=2, seed=0)
    assert len(after) == 12
    # Three quarters of the logarithm: 2 ** 0.25 is left.
    for pair in after:
        assert 0.01 / pair.latency.tpot_s == pytest.approx(2**0.25)


def test_too_few_launches_are_left_out() -> None:
    assert after_launches(pairs({"qwen3-32b": 1.1}, each=3), launches=3, draws=1, seed=0) == []


def test_a_factor_is_applied_to_its_engine_alone() -> None:
    found = pairs({"llama-3.1-8b": 1.5, "llama-3.1-70b": 1.5})
    residuals = fit(found, origin="here")
    before = found[0]
    ours = calibrated(before.latency, before.launch, residuals)
    assert ours.tpot_s > before.latency.tpot_s
    other = replace(
        before.launch, engine=launch_of({**CELLS, "backend": "sglang"}, number=1).engine
    )
    assert calibrated(before.latency, other, residuals) == before.latency
