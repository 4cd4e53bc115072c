"""Fits the rates that an engine reaches to the steps that launches of it showed.

    minimise  sum_i w_i (log predicted_i / measured_i)^2 + (0.1 / 2)^2 sum_k x_k^2

over the logarithms x_k of nine rates (tuner/prices/serve/reached.py) over what the profile of the
device says. The weak second term keeps a rate that no step shows near the profile's. Points far off
count linearly (pseudo-Huber), because one disturbed step must not bend all rates.

What is predicted is what plans predict: `prompt_step_s` and `step_s` of tuner/costs/serve.

Letters: I points, K rates.
"""

import statistics
from dataclasses import fields
from typing import Final

import numpy as np

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
NUDGE: Final = 1e-3
LARGEST_STEP: Final = 0.7
ROUNDS: Final = 60
MOST_DAMPING: Final = 1e8

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

    def loss(residual_I: Floats, offset_K: Floats) -> float:
        far = float(np.sum(np.sqrt(1.0 + residual_I**2) - 1.0))
        return 2.0 * far + float(np.sum((offset_K / PRIOR) ** 2))

    offset_K, damping = np.zeros(len(names)), 1e-2
    for _ in range(ROUNDS):
        now_I = residuals(offset_K)
        weight_I = 1.0 / np.sqrt(1.0 + now_I**2)
        slope_IK = np.stack(
            [
                (residuals(offset_K + NUDGE * unit_K) - now_I) / NUDGE
                for unit_K in np.eye(len(names))
            ],
            axis=1,
        )
        normal_KK = slope_IK.T @ (weight_I[:, None] * slope_IK) + np.eye(len(names)) / PRIOR**2
        gradient_K = slope_IK.T @ (weight_I * now_I) + offset_K / PRIOR**2
        damped_KK = normal_KK + damping * np.diag(np.diag(normal_KK))
        step_K = np.clip(-np.linalg.solve(damped_KK, gradient_K), -LARGEST_STEP, LARGEST_STEP)
        if loss(residuals(offset_K + step_K), offset_K + step_K) < loss(now_I, offset_K):
            offset_K, damping = offset_K + step_K, damping / 3.0
            if float(np.max(np.abs(step_K))) < NUDGE:
                break
        else:
            damping *= 4.0
            if damping > MOST_DAMPING:
                break
    return rates_at(offset_K)
