"""Disaggregated prefill and decode, for planning and for the backtest.

Prompts wait in one queue, first come first served, for whichever prefill worker is free. Its ranks
step together, as long as the longest prompt takes: each reads one prompt, or several that are no
longer together, and those without one only run their experts. Finished KV caches are transferred
and join the decode ranks, which share the running sequences evenly and step together, as attention
data parallelism makes them. The first token comes when a request joins its decode rank, from where
clients are answered. With drafts a step yields as many tokens as it does on average (batching.py).
A prefill worker that is a pipeline takes the next prompts when its longest stage is free. Between
two events all steps are taken in one jump, as in batching.py. Requests whose prompts were prefilled
elsewhere join as they arrive.

Not covered: steps that several prompts of one rank make longer, routing by load, transfers that
wait for each other, memory that runs out as outputs grow (a request joins where its prompt fits).
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tuner.simulate.serving.load import Requests, RunningSequences, Served
from tuner.simulate.serving.steps import StepTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stations:
    """Prefill workers and decode ranks."""

    prefill_workers: int
    prefill_ranks: int
    """Ranks of one worker: prompts that it reads at once."""
    prompt_s: Callable[[int, int], float]
    """Seconds of a step whose longest prompt has so many tokens, with so many ranks busy."""
    kv_transfer_s: Callable[[int], float]
    decode_ranks: int
    decode: StepTimes
    """Step times of one decode rank."""
    prefill_slot_ratio: float = 1.0
    """Share of a step after which a prefill worker begins the next (a pipeline's longest stage)."""
    kv_tokens: float = math.inf
    """Tokens that the KV cache of one decode rank holds."""
    most_running: float = math.inf
    """Largest number of sequences that one decode rank runs."""


def prompts_of_step(
    queue: deque[int], inputs: Sequence[int], *, ranks: int
) -> tuple[list[int], int]:
    """Take the prompts of a worker's next step off its queue, with the longest rank's tokens.

    Each rank gets one; where all have one, those behind fill ranks up to the longest prompt.
    """
    count = min(len(queue), ranks)
    taken = [queue.popleft() for _ in range(count)]
    tokens = [inputs[request] for request in taken]
    longest = max(tokens)
    if count == ranks:
        heapq.heapify(tokens)
        while queue and tokens[0] + inputs[queue[0]] <= longest:
            heapq.heapreplace(tokens, tokens[0] + inputs[queue[0]])
            taken.append(queue.popleft())
    return taken, longest


@dataclass(slots=True, kw_only=True)
class _DisaggregatedSimulation(RunningSequences):
    stations: Stations
    free_s: list[float]
    """Heap: when each prefill worker is free."""
    queue: deque[int] = field(default_factory=deque)
    """Prompts that wait for a prefill worker."""
    ready: list[tuple[float, int]] = field(default_factory=list)
    """Heap: when a read prompt has been transferred."""

    def send(self, request: int, at_s: float) -> None:
        """Let a request come at that time, to the decode ranks if its prompt has been read."""
        if self.prefilled_elsewhere[request]:
            self.arrived_s[request] = at_s
            heapq.heappush(self.ready, (at_s, request))
        else:
            heapq.heappush(self.coming, (at_s, request))

    def read(self) -> None:
        """Let workers that are free by now take what has come by then."""
        while self.coming or self.queue:
            free_s = self.free_s[0]
            start_s = free_s if self.queue else max(free_s, self.coming[0][0])
            if start_s > self.now_s:
                return
            while self.coming and self.coming[0][0] <= start_s:
                at_s, request = heapq.heappop(self.coming)
                self.arrived_s[request] = at_s
                self.queue.append(request)
            taken, longest = prompts_of_step(
                self.queue, self.inputs, ranks=self.stations.prefill_ranks
            )
            busy = min(len(taken), self.stations.prefill_ranks)
            step_s = self.stations.prompt_s(longest, busy)
            heapq.heapreplace(self.free_s, start_s + self.stations.prefill_slot_ratio * step_s)
            end_s = start_s + step_s
            for request in taken:
                handed_s = end_s + self.stations.kv_transfer_s(self.inputs[request])
                heapq.heappush(self.ready, (handed_s, request))

    def next_s(self) -> float:
        """Return when something happens on the prefill side next."""
        ready_s = self.ready[0][0] if self.ready else math.inf
        if self.queue:
            return min(ready_s, self.free_s[0])
        if self.coming:
            return min(ready_s, max(self.free_s[0], self.coming[0][0]))
        return ready_s

    def join(self) -> None:
        """Take in what has been transferred, as memory allows."""
        ranks = self.stations.decode_ranks
        room, most_running = self.stations.kv_tokens * ranks, self.stations.most_running * ranks
        while self.ready and self.ready[0][0] <= self.now_s:
            request = self.ready[0][1]
            is_full = len(self.running) >= most_running or self.past + self.inputs[request] > room
            if self.running and is_full:
                return
            heapq.heappop(self.ready)
            self.first_s[request] = self.now_s
            heapq.heappush(self.running, (self.step + self.steps_of(request), request))
            self.past += self.inputs[request] + 1

    def steps_of(self, request: int) -> int:
        """Decode steps of a request; one at least."""
        return self.stations.decode.steps_of(max(self.outputs[request] - 1, 1))

    def jump(self) -> None:
        """Steps until a sequence ends or one joins."""
        ranks = self.stations.decode_ranks
        num = len(self.running)
        sequences = min(-(-num // ranks), self.stations.decode.most_sequences)
        mean_past = self.past / num
        steps = self.running[0][0] - self.step
        gained = self.stations.decode.tokens_per_step
        middle = mean_past + 0.5 * (steps - 1) * gained
        step_s = self.stations.decode.decode_step_s(sequences, middle)
        next_s = self.next_s()
        if self.now_s < next_s < self.now_s + steps * step_s:
            steps = min(max(math.ceil((next_s - self.now_s) / step_s), 1), steps)
        self.now_s += steps * step_s
        self.step += steps
        self.past += steps * num * gained
        while self.running and self.running[0][0] <= self.step:
            _, request = heapq.heappop(self.running)
            self.past -= self.inputs[request] + 1 + self.steps_of(request) * gained
            self.end_s[request] = self.now_s
            self.send_after(request, self.now_s)


def simulate_disaggregated(requests: Requests, *, stations: Stations, concurrency: int) -> Served:
    """Serve all requests: as they arrive, or in a closed loop `concurrency` at a time."""
    simulation = _DisaggregatedSimulation.of(
        requests, stations=stations, free_s=[0.0] * stations.prefill_workers
    )
    simulation.send_first(requests, concurrency=concurrency)
    while len(simulation.end_s) < len(requests.input_R):
        simulation.read()
        simulation.join()
        if simulation.running:
            simulation.jump()
        else:
            simulation.now_s = max(simulation.now_s, simulation.next_s())
    return simulation.served(requests)
