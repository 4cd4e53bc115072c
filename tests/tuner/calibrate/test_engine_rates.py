"""Rates of an engine, fitted to its steps."""

from dataclasses import replace

import numpy as np
import pytest

from tests.tuner.models import example_model
from tuner.calibrate.engine_rates import first_rates, fit_rates, measured_steps, predicted_steps
from tuner.costs.serve.engine_steps import DecodePoint, EngineSteps, LaunchSteps, PromptPoint
from tuner.devices.catalogue import CPU
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import ServingMachine
from tuner.prices.serve.reached import ReachedRates

MACHINE = ServingMachine(engines=ENGINE_TRAITS, sheet=CPU, tables=None)
TRUE = ReachedRates(
    gemm_flop_per_s=150e9,
    expert_flop_per_s=78e9,
    attention_flop_per_s=200e9,
    weight_bytes_per_s=16e9,
    cache_bytes_per_s=12e9,
    step_s=4.7e-3,
    tensor_step_s=2.5e-3,
    sequence_s=2e-4,
    request_s=6e-3,
)
PROMPTS, SEQUENCES, PASTS = (16, 64, 256, 1024), (1, 2, 4, 8, 16), (32, 512)
POINTS = 28
"""Of two launches."""


def steps_of(seconds: list[float], *, model: str = "mixtral-8x22b") -> EngineSteps:
    waiting = iter(seconds)
    return EngineSteps(
        engine="vllm",
        release="0.32.0",
        device="a processor",
        command="bash {launch}/local.sh",
        model=example_model(model),
        launches=tuple(
            LaunchSteps(
                tensor_parallel=tensor,
                prompts=tuple(PromptPoint(tokens=one, seconds=(next(waiting),)) for one in PROMPTS),
                decodes=tuple(
                    DecodePoint(sequences=one, past_tokens=past, seconds=(next(waiting),))
                    for one in SEQUENCES
                    for past in PASTS
                ),
            )
            for tensor in (1, 2)
        ),
    )


def true_steps(model: str) -> EngineSteps:
    blank = steps_of([1.0] * POINTS, model=model)
    return steps_of(predicted_steps(blank, MACHINE, TRUE).tolist(), model=model)


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_rates_are_recovered_and_price_another_model(noise: float) -> None:
    exact = true_steps("tiny-moe")
    shaken = np.exp(noise * np.random.default_rng(7).normal(size=POINTS))
    steps = steps_of((measured_steps(exact) * shaken).tolist(), model="tiny-moe")
    rates = fit_rates(steps, MACHINE)
    fitted = predicted_steps(exact, MACHINE, rates) / measured_steps(exact)
    assert np.abs(fitted - 1.0).max() < 0.03 + 2.0 * noise
    other = true_steps("mixtral-8x22b")
    unseen = predicted_steps(other, MACHINE, rates) / measured_steps(other)
    first = predicted_steps(other, MACHINE, first_rates(CPU)) / measured_steps(other)
    assert np.median(np.abs(unseen - 1.0)) < 0.5 * np.median(np.abs(first - 1.0)) + 0.05


def test_one_disturbed_step_does_not_bend_the_others() -> None:
    exact = measured_steps(true_steps("tiny-moe"))
    disturbed = exact.copy()
    disturbed[2] *= 6.0
    rates = fit_rates(steps_of(disturbed.tolist(), model="tiny-moe"), MACHINE)
    fitted = predicted_steps(true_steps("tiny-moe"), MACHINE, rates)
    assert np.median(np.abs(fitted / exact - 1.0)) < 0.1


def test_scaled_rates_leave_the_others() -> None:
    assert TRUE.scaled({"step_s": 2.0}) == replace(TRUE, step_s=9.4e-3)
