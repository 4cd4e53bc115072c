"""Fits the rates that an engine reaches to the steps that launches of it showed.

The residuals of tuner/calibrate/gauss_newton.py are log(predicted / measured) of every point, the
factors those of nine rates (tuner/prices/serve/reached.py) over what the profile of the device
says. Their weak priors keep a rate that no step shows near the profile's.

What is predicted is what plans predict: `prompt_step_s` and `step_s` of tuner/costs/serve.

Letters: I points, K rates.
"""

import statistics
from dataclasses import fields
from typing import Final

import numpy as np

from tuner.calibrate.gauss_newton import fit_factors
from tuner.costs.serve.decoder import Formats, decoder_of
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.engine_steps import EngineSteps
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.whole_step import prompt_step_s, step_s
from tuner.devices.datasheet import Datasheet
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.machine import ServingMachine
from tuner.prices.serve.reached import ReachedRates, reached_machine

NOISE: Final = 0.1
"""Standard deviation of the logarithm of one measured point."""
PRIOR: Final = 2.0
"""Prior standard deviation of the logarithm of a rate: a kernel may reach a seventh of what the
profile's did."""

HOST: Final = {"step_s": 2e-3, "tensor_step_s": 1e-3, "sequence_s": 1e-4, "request_s": 5e-3}
"""Seconds of Python's part of a step and of a request, before any step was seen."""


_BF16: Final = Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16")


def first_rates(sheet: Datasheet) -> ReachedRates:
    """Return what a device's profile says of its rates."""
    peak = sheet.flop_per_s["bf16"]
    return ReachedRates(
        gemm_flop_per_s=peak,
        expert_flop_per_s=peak,
        attention_flop_per_s=peak,
        weight_bytes_per_s=sheet.memory_bytes_per_s,
        cache_bytes_per_s=sheet.memory_bytes_per_s,
        **HOST,
    )


def predicted_steps(steps: EngineSteps, machine: ServingMachine, rates: ReachedRates) -> Floats:
    """Predict every point in seconds: launch by launch, prompts, then decodes."""
    parts = []
    for launch in steps.launches:
        tensor = launch.tensor_parallel
        iteration = Iteration(
            decoder=decoder_of(steps.model),
            formats=_BF16,
            degrees=InstanceDegrees(attention_tensor=tensor, moe_tensor=tensor),
            traits=machine.engines[steps.engine],
            machine=reached_machine(machine, rates),
        )
        prompt_Q = np.array([float(prompt.tokens) for prompt in launch.prompts])
        running_Q = np.array([float(decode.sequences) for decode in launch.decodes])
        past_Q = np.array([float(decode.past_tokens) for decode in launch.decodes])
        first_Q = prompt_step_s(iteration, prompt_Q, np.zeros_like(prompt_Q)) + rates.request_s
        parts += [first_Q, step_s(iteration, running_Q, past_Q)]
    return np.concatenate(parts)


def measured_steps(steps: EngineSteps) -> Floats:
    """Return the median of every point in seconds, in the same order."""
    points = []
    for launch in steps.launches:
        points += [prompt.seconds for prompt in launch.prompts]
        points += [decode.seconds for decode in launch.decodes]
    return np.array([statistics.median(seconds) for seconds in points])


def fit_rates(steps: EngineSteps, machine: ServingMachine) -> ReachedRates:
    """Fit an engine's rates, by damped Gauss-Newton steps on their logarithms."""
    first = first_rates(machine.sheet)
    names = [field.name for field in fields(ReachedRates)]
    log_measured_I = np.log(measured_steps(steps))

    def rates_at(offset_K: Floats) -> ReachedRates:
        return first.scaled(dict(zip(names, np.exp(offset_K).tolist(), strict=True)))

    def residuals(offset_K: Floats) -> Floats:
        predicted_I = predicted_steps(steps, machine, rates_at(offset_K))
        return np.asarray((np.log(predicted_I) - log_measured_I) / NOISE)

    prior_K = np.full(len(names), PRIOR)
    return rates_at(fit_factors(residuals, prior_K).offset_K)
