"""Multiplexed prefill and decode: two servers on shares of the same devices, event by event.

    prefill   one batch of whole prompts at a time, first come first served, up to a budget of
              tokens
    decode    every running sequence gets a token a step

While both have work, a prompt takes its seconds on its share and a step its seconds beside a
prompt; while one has nothing to do, the other has the whole device. A prefilled sequence joins
at the end of the current step. Between two events all steps are taken in one jump, as in
batching.py. Memory admits a prompt only if it and its output fit beside what is reserved.

Source: the loop of SGLang's PD multiplexing (sglang 0.5.23, srt/multiplex/multiplexing_mixin.py):
one prefill batch beside the running batch, whole devices where either is idle.

Not covered: shares that change at other times than SGLang's, which keeps those of a batch until it
ends; attention-data ranks; caches that grow beyond what is reserved.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from tuner.simulate.serving.load import Requests, RunningSequences, Served
from tuner.simulate.serving.steps import StepTimes

LEAST_LEFT_RATIO: Final = 1e-9
"""Share of a batch's work below which the rest is floating-point error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Seconds of both phases, alone and beside the other."""

    isolated_prompts: StepTimes
    multiplexed_prompts: StepTimes
    isolated_steps: StepTimes
    multiplexed_steps: StepTimes
    step_tokens: int
    """Largest number of tokens of a batch of prompts, but for one longer prompt."""
    kv_tokens: float = math.inf
    most_running: int = 2**31


@dataclass(slots=True, kw_only=True)
class _SharedSimulation(RunningSequences):
    phases: Phases
    waiting: deque[int] = field(default_factory=deque)
    batch: list[int] = field(default_factory=list)
    """Prompts under way."""
    left_ratio: float = 0.0
    """Share of the work of `batch` that is left."""
    reserved: int = 0

    def arrive(self) -> None:
        """Take in what has come by now."""
        while self.coming and self.coming[0][0] <= self.now_s:
            at_s, request = heapq.heappop(self.coming)
            self.arrived_s[request] = at_s
            self.waiting.append(request)

    def begin(self) -> None:
        """Begin a batch of prompts, as budget and memory allow."""
        if self.batch:
            return
        tokens = 0
        while self.waiting:
            request = self.waiting[0]
            need = self.inputs[request] + self.outputs[request]
            in_flight = len(self.running) + len(self.batch)
            is_full = (
                in_flight >= self.phases.most_running
                or self.reserved + need > self.phases.kv_tokens
            )
            computed = self.inputs[request] - self.cached[request]
            is_over = self.batch and tokens + computed > self.phases.step_tokens
            if is_over or (is_full and in_flight):
                break
            self.batch.append(self.waiting.popleft())
            self.reserved += need
            tokens += computed
        if self.batch:
            self.left_ratio = 1.0

    def batch_s(self, times: StepTimes) -> float:
        """Seconds of the whole batch."""
        tokens = sum(self.inputs[request] - self.cached[request] for request in self.batch)
        attention_s = sum(
            times.prefill_s(self.inputs[request]) - times.prefill_s(self.cached[request])
            for request in self.batch
        )
        return times.mixed_s(tokens, attention_s, running=0, past=0.0, ended=len(self.batch))

    def steps(self) -> None:
        """Steps until a sequence ends, the prompts end, or a request comes to an idle prefill."""
        num = len(self.running)
        times = self.phases.multiplexed_steps if self.batch else self.phases.isolated_steps
        steps = self.running[0][0] - self.step
        sequences = min(num, times.most_sequences)
        step_s = times.decode_step_s(sequences, self.past / num + 0.5 * (steps - 1))
        until_s = math.inf
        if self.batch:
            prompts_s = self.batch_s(self.phases.multiplexed_prompts)
            until_s = self.left_ratio * prompts_s
        elif self.coming:
            until_s = max(self.coming[0][0] - self.now_s, 0.0)
        if until_s < steps * step_s:
            steps = min(max(math.ceil(until_s / step_s), 1), steps)
        self.now_s += steps * step_s
        self.step += steps
        self.past += steps * num
        while self.running and self.running[0][0] <= self.step:
            _, request = heapq.heappop(self.running)
            self.past -= self.inputs[request] + self.outputs[request]
            self.finish(request)
        if self.batch:
            self.left_ratio -= steps * step_s / prompts_s
            if self.left_ratio <= LEAST_LEFT_RATIO:
                self.read()

    def read(self) -> None:
        """The prompts under way have been read; their sequences run from now on."""
        self.left_ratio = 0.0
        read, self.batch = self.batch, []
        for request in read:
            self.first_s[request] = self.now_s
            if self.outputs[request] == 1:
                self.finish(request)
            else:
                heapq.heappush(self.running, (self.step + self.outputs[request] - 1, request))
                self.past += self.inputs[request] + 1

    def finish(self, request: int) -> None:
        """Note the end, and send what a closed loop sends then."""
        self.end_s[request] = self.now_s
        self.reserved -= self.inputs[request] + self.outputs[request]
        self.send_after(request, self.now_s)


def simulate_shared(requests: Requests, *, phases: Phases, concurrency: int = 1) -> Served:
    """Serve all requests on one instance.

    Args:
        requests: with arrivals, or without for a closed loop.
        phases: seconds of both phases.
        concurrency: requests in flight in a closed loop.
    """
    simulation = _SharedSimulation.of(requests, phases=phases)
    simulation.send_first(requests, concurrency=concurrency)
    while len(simulation.end_s) < len(requests.input_R):
        simulation.arrive()
        simulation.begin()
        if simulation.running:
            simulation.steps()
        elif simulation.batch:
            simulation.now_s += simulation.left_ratio * simulation.batch_s(phases.isolated_prompts)
            simulation.read()
        else:
            simulation.now_s = max(simulation.now_s, simulation.coming[0][0])
    return simulation.served(requests)
