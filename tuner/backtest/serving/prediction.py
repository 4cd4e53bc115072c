"""TTFT and TPOT of a launch: its steps priced, its load played.

    TPOT    mean over requests of (end - first token) / (answer - 1)
    TTFT    mean of queue and prefill, plus (1.5 + k) TPOT + 15 ms

A request that comes waits on average half of the step under way; the engine hands out its first
token one step after it was computed; k further steps where recipes poll for requests or stream
tokens at intervals; 15 ms pass in the HTTP server, the tokeniser and the client.

Load: C requests at once, then one for each that ends. InferenceX sends 10 C in all, of lengths even
in 0.8 to 1 of the nominal. The driver of the other rows is taken to do the same.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tuner.backtest.serving.launches import Launch
from tuner.backtest.serving.recipes import Recipe, recipe_of
from tuner.costs.serving.engine import TRAITS, Batching
from tuner.costs.serving.iteration import Iteration
from tuner.costs.serving.machine import ServingMachine
from tuner.costs.serving.memory import kv_tokens
from tuner.simulate.serving.batching import Rules, simulate
from tuner.simulate.serving.load import Served, uniform_requests
from tuner.simulate.serving.steps import StepTimes, step_times

ROUNDS: Final = 10
"""Requests in all, in multiples of the concurrency (InferenceX, benchmark scripts)."""
STEPS_BEFORE_TOKEN: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Means over requests."""

    ttft_s: float
    tpot_s: float
    estimated: tuple[str, ...] = ()
    """Operations that no table held."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictor:
    """Machines by system; prices that several rows share are kept."""

    machines: dict[str, ServingMachine]
    steps: dict[tuple[object, ...], StepTimes] = field(default_factory=dict)

    def latency(self, launch: Launch) -> Latency:
        """Predict one aggregated launch."""
        side = launch.sides[0]
        machine = self.machines[launch.system]
        recipe = recipe_of(launch)
        iteration = Iteration(
            decoder=launch.decoder,
            formats=launch.formats,
            degrees=side.degrees,
            engine=launch.engine,
            machine=machine,
            sequence_s=recipe.sequence_s,
            experts_table=recipe.experts_table,
        )
        data = side.degrees.attention_data
        concurrency = max(-(-launch.concurrency // data), 1)
        rules = self._rules(launch, iteration, recipe, concurrency)
        times = self._times(launch, iteration, concurrency, rules)
        requests = uniform_requests(
            ROUNDS * concurrency,
            input_tokens=launch.input_tokens,
            output_tokens=launch.output_tokens,
            least_ratio=recipe.least_ratio,
            delay_s=recipe.delay_s,
            seed=launch.concurrency,
        )
        served = simulate(requests, times=times, rules=rules, concurrency=concurrency)
        return latency_of(served, recipe, estimated=tuple(sorted(machine.estimated)))

    def _rules(
        self, launch: Launch, iteration: Iteration, recipe: Recipe, concurrency: int
    ) -> Rules:
        traits = TRAITS[launch.engine]
        step_tokens = recipe.step_tokens or traits.step_tokens
        if traits.batching is Batching.WHOLE:
            step_tokens = max(step_tokens, concurrency + launch.input_tokens + 64)
        return Rules(
            batching=traits.batching,
            step_tokens=step_tokens,
            poll_steps=recipe.poll_steps,
            reserves_answers=traits.batching is not Batching.CHUNKED,
            kv_tokens=kv_tokens(
                launch.decoder,
                launch.formats,
                iteration.degrees,
                traits=traits,
                memory_bytes=iteration.machine.sheet.memory_bytes,
                least=2.0 * (launch.input_tokens + launch.output_tokens),
            ),
        )

    def _times(
        self, launch: Launch, iteration: Iteration, concurrency: int, rules: Rules
    ) -> StepTimes:
        longest = launch.input_tokens + launch.output_tokens
        most = 1 << max(concurrency, 1).bit_length()
        tokens = rules.step_tokens + most
        key = (
            launch.system,
            launch.engine,
            launch.decoder.name,
            launch.formats,
            iteration.degrees,
            iteration.sequence_s,
            iteration.experts_table,
            longest,
            most,
            tokens,
        )
        if key not in self.steps:
            self.steps[key] = step_times(
                iteration, most_tokens=tokens, most_sequences=most, longest=longest
            )
        return self.steps[key]


def latency_of(served: Served, recipe: Recipe, *, estimated: tuple[str, ...]) -> Latency:
    """Means, as a client sees them."""
    tpot_s = float(np.mean(served.tpot_s_R)) if (served.output_R > 1).any() else 0.0
    inside_s = float(np.mean(served.ttft_s_R))
    ttft_s = inside_s + (STEPS_BEFORE_TOKEN + recipe.stream_steps) * tpot_s + recipe.client_s
    return Latency(ttft_s=ttft_s, tpot_s=tpot_s, estimated=estimated)
