"""Requests that a router spreads over several instances, event by event.

Every rank of every instance is an engine of its own (batching.py); ranks of one instance get its
requests in turn. A request is sent when it arrives, by what is outstanding then, to one instance,
or, where prefill is disaggregated, to one prefill and one decode instance, as the gateways of
SGLang and vLLM choose both at once. Prefill workers have a queue each, first come first served.

    outstanding of prefill    until the prompt is prefilled (vllm-router 0.1.17, pd_types.rs), or
                              until the request ends (sglang-router, pd_router.rs: one guard for
                              both)
    outstanding of decode     from the arrival on until the request ends

Ranks run ahead of each other: one that only decodes is not touched until one of its sequences ends
or a request comes, so the work is a few events a request and not one for each instance.

Prefixes: a request belongs to a session, drawn evenly. Its prefix lies on the instance where the
session's request before went, or, where the router chooses among ranks, on the rank; elsewhere the
prompt is computed whole. Of an instance that spreads its requests over ranks with a cache each,
`found_ratio` says how many come to the right one.

Ranks that wait for each other do so as long as they do on average (lockstep.py, `beside_peers`).

Not covered: loads that routers poll, transfers that wait for each other, memory of a decode
instance that runs out as outputs grow.

Letters: R requests.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.simulate.serving.batching import EngineRank, Rules
from tuner.simulate.serving.disaggregated import prompts_of_step
from tuner.simulate.serving.load import Requests, SentRequests, Served
from tuner.simulate.serving.routing import Router
from tuner.simulate.serving.steps import StepTimes
from tuner.spec.serving.routers import RouterPolicy

TURNS: Final = 4
"""Requests of a session, mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedInstances:
    """Equal instances that decode, or prefill and decode."""

    count: int
    ranks: int
    """Attention-data ranks of each."""
    times: StepTimes
    """Step times of one rank."""
    rules: Rules
    """Rules of one rank."""
    weight: float
    """Sequences that one instance may run at once."""
    found_ratio: float = 1.0
    """Share of requests that come to the rank of the instance with their prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillInstances:
    """Equal prefill instances."""

    count: int
    ranks: int
    """Prompts that one instance prefills at once."""
    prompt_s: Callable[[int, int], float]
    """Seconds of a step whose longest prompt has so many tokens, with so many ranks busy, where the
    prefix cache holds the share that is stated."""
    whole_prompt_s: Callable[[int, int], float]
    """Seconds of such a step whose prompts are not in the prefix cache at all."""
    kv_transfer_s_by_kind: Sequence[Callable[[int], float]]
    """Seconds in which a cache of so many tokens gets to each kind of decode instances."""
    weight: float
    slot_ratio: float = 1.0
    """Share of a step after which the next begins (a pipeline's longest stage)."""
    found_ratio: float = 1.0
    """Share of requests that come to the rank of the instance with their prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRouting:
    """Policies by which requests are spread."""

    policy: RouterPolicy
    """Policy for aggregated or prefill instances."""
    decode_policy: RouterPolicy = RouterPolicy.LEAST_REQUESTS
    holds_prefill: bool = False
    """Whether a request counts on its prefill instance until it ends."""
    has_sessions: bool = False
    """Whether prefixes lie where a session's request before went; else on every instance."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routed:
    """Served requests, and the instance of each."""

    served: Served
    place_R: npt.NDArray[np.int64]
    """Instance that decoded, counted through the kinds."""
    hit_ratio: float
    """Share of requests sent to the instance with their prefix."""


@dataclass(slots=True)
class _PrefillWorker:
    """One prefill instance."""

    prefills: PrefillInstances
    queue: deque[int] = field(default_factory=deque)
    free_s: float = 0.0

    def due_s(self, arrived_s: dict[int, float]) -> float:
        return max(self.free_s, arrived_s[self.queue[0]]) if self.queue else math.inf

    def read(self, inputs: list[int], misses: set[int], start_s: float) -> tuple[list[int], float]:
        """Read the next prompts; which, and when they are done."""
        taken, longest = prompts_of_step(self.queue, inputs, ranks=self.prefills.ranks)
        busy = min(len(taken), self.prefills.ranks)
        if misses.isdisjoint(taken):
            step_s = self.prefills.prompt_s(longest, busy)
            self.free_s = start_s + self.prefills.slot_ratio * step_s
            return taken, start_s + step_s
        step_s = 0.0
        for prompt_s, is_miss in (
            (self.prefills.prompt_s, False),
            (self.prefills.whole_prompt_s, True),
        ):
            longest = max(
                (inputs[request] for request in taken if (request in misses) is is_miss), default=0
            )
            step_s = max(step_s, prompt_s(longest, busy) if longest else 0.0)
        self.free_s = start_s + self.prefills.slot_ratio * step_s
        return taken, start_s + step_s


@dataclass(slots=True, kw_only=True)
class _RoutedSimulation(SentRequests):
    kinds: Sequence[RoutedInstances]
    prefills: Sequence[PrefillInstances]
    routing: RequestRouting
    rng: np.random.Generator
    sessions: list[int]
    ranks: list[EngineRank] = field(default_factory=list)
    place_of_rank: list[int] = field(default_factory=list)
    ranks_of: list[list[int]] = field(default_factory=list)
    """Numbers of an instance's ranks."""
    kind_of: list[int] = field(default_factory=list)
    workers: list[_PrefillWorker] = field(default_factory=list)
    due: list[tuple[float, int, int]] = field(default_factory=list)
    """Heap: when a rank, or beyond them a worker, is due; with the version of the entry."""
    version: list[int] = field(default_factory=list)
    transferred: list[tuple[float, int]] = field(default_factory=list)
    completions: list[tuple[float, int, bool]] = field(default_factory=list)
    """Heap: when a request ends on a place, and whether that is a prefill one."""
    place: dict[int, int] = field(default_factory=dict)
    reader: dict[int, int] = field(default_factory=dict)
    holder: dict[int, int] = field(default_factory=dict)
    misses: set[int] = field(default_factory=set)
    ended: int = 0

    def build(self) -> tuple[Router, Router]:
        """Set up ranks, workers and the two routers; without prefill the first is unused."""
        weights: list[float] = []
        for number, kind in enumerate(self.kinds):
            for _ in range(kind.count):
                place = len(weights)
                weights.append(kind.weight)
                self.kind_of.append(number)
                self.ranks_of.append([])
                for _ in range(kind.ranks):
                    self.ranks_of[place].append(len(self.ranks))
                    self.place_of_rank.append(place)
                    self.ranks.append(self._rank(kind))
        reading = []
        for prefills in self.prefills:
            reading += [prefills.weight] * prefills.count
            self.workers += [_PrefillWorker(prefills) for _ in range(prefills.count)]
        self.version = [0] * (len(self.ranks) + len(self.workers))
        decode_policy = self.routing.decode_policy if self.prefills else self.routing.policy
        return (
            Router(policy=self.routing.policy, weight_N=reading or [1.0], rng=self.rng),
            Router(policy=decode_policy, weight_N=weights, rng=self.rng),
        )

    def _rank(self, kind: RoutedInstances) -> EngineRank:
        return EngineRank(
            times=kind.times,
            rules=kind.rules,
            observe=None,
            inputs=self.inputs,
            outputs=self.outputs,
            delays_s=[],
            prefilled_elsewhere=self.prefilled_elsewhere,
            cached=self.cached,
        )

    def wake(self, number: int) -> None:
        """Note when a rank or worker is due next."""
        self.version[number] += 1
        ranks = len(self.ranks)
        due_s = (
            self.ranks[number].due_s()
            if number < ranks
            else self.workers[number - ranks].due_s(self.arrived_s)
        )
        if due_s < math.inf:
            heapq.heappush(self.due, (due_s, self.version[number], number))

    def next_due_s(self) -> float:
        """Return when a rank or worker is due first."""
        due, version = self.due, self.version
        while due and due[0][1] != version[due[0][2]]:
            heapq.heappop(due)
        return due[0][0] if due else math.inf

    def turn(self, until_s: float) -> None:
        """Let the rank or worker that is due first go on, a rank until others are due, or then."""
        due = self.due
        due_s, _, number = heapq.heappop(due)
        if number >= len(self.ranks):
            self.read(number - len(self.ranks), due_s)
            self.wake(number)
            return
        rank = self.ranks[number]
        end_s, before = rank.end_s, len(rank.end_s)
        others_s = due[0][0] if due else math.inf
        while True:
            rank.turn()
            due_s = rank.due_s()
            if due_s > until_s or due_s >= others_s or len(end_s) > before:
                break
        if len(end_s) > before:
            place = self.place_of_rank[number]
            for request in list(islice(reversed(end_s), len(end_s) - before)):
                self.finish(request, place, end_s[request])
        self.version[number] += 1
        if due_s < math.inf:
            heapq.heappush(due, (due_s, self.version[number], number))

    def read(self, worker: int, start_s: float) -> None:
        """Let a prefill worker read its next prompts, and hand their caches over."""
        taken, end_s = self.workers[worker].read(self.inputs, self.misses, start_s)
        for request in taken:
            kind = self.kind_of[self.place[request]]
            sent_s = self.workers[worker].prefills.kv_transfer_s_by_kind[kind](self.inputs[request])
            heapq.heappush(self.transferred, (end_s + sent_s, request))
            if not self.routing.holds_prefill:
                heapq.heappush(self.completions, (end_s, worker, True))

    def finish(self, request: int, place: int, end_s: float) -> None:
        """A request has ended; a closed loop sends what comes then."""
        self.ended += 1
        heapq.heappush(self.completions, (end_s, place, False))
        if self.prefills and self.routing.holds_prefill:
            heapq.heappush(self.completions, (end_s, self.reader[request], True))
        self.send_after(request, end_s)

    def arrive(self, prefill: Router, decode: Router) -> None:
        """Send the request that comes next to its instances."""
        at_s, request = heapq.heappop(self.coming)
        while self.completions and self.completions[0][0] <= at_s:
            _, place, is_prefill = heapq.heappop(self.completions)
            (prefill if is_prefill else decode).end(place)
        self.arrived_s[request] = at_s
        first = prefill if self.prefills else decode
        holder = self.prefix_holder(request, len(first.outstanding))
        place = first.send(holder)
        if holder is not None:
            self.holder[self.sessions[request]] = place
        if holder not in (None, place) or self.loses_prefix(place):
            self.misses.add(request)
            self.cached[request] = 0
        if not self.prefills:
            self.place[request] = place
            self.offer(request, at_s)
            return
        self.reader[request], self.place[request] = place, decode.send()
        queue = self.workers[place].queue
        queue.append(request)
        if len(queue) == 1:
            self.wake(len(self.ranks) + place)

    def prefix_holder(self, request: int, count: int) -> int | None:
        """Return the instance with the request's prefix."""
        if not self.routing.has_sessions:
            return None
        session = self.sessions[request]
        if session not in self.holder:
            self.holder[session] = int(self.rng.integers(count))
        return self.holder[session]

    def loses_prefix(self, place: int) -> bool:
        """Draw whether a request comes to a rank of its instance without its prefix."""
        found_ratio = (
            self.workers[place].prefills if self.prefills else self.kinds[self.kind_of[place]]
        ).found_ratio
        return found_ratio < 1.0 and self.rng.random() >= found_ratio

    def offer(self, request: int, at_s: float) -> None:
        """Give a request to the next rank of its instance."""
        instance_ranks = self.ranks_of[self.place[request]]
        number = instance_ranks[0]
        instance_ranks.append(instance_ranks.pop(0))
        self.ranks[number].send(request, at_s)
        self.wake(number)


def simulate_routed(
    requests: Requests,
    *,
    kinds: Sequence[RoutedInstances],
    prefills: Sequence[PrefillInstances] = (),
    routing: RequestRouting,
    concurrency: int = 1,
) -> Routed:
    """Serve all requests on several instances.

    Args:
        requests: with arrivals, or without for a closed loop.
        kinds: instances that decode, in the order in which the router lists them.
        prefills: prefill instances; none: those that decode prefill too.
        routing: how requests are spread.
        concurrency: requests in flight in a closed loop.
    """
    count = len(requests.input_R)
    rng = np.random.default_rng(routing.seed)
    simulation = _RoutedSimulation.of(
        requests,
        kinds=kinds,
        prefills=prefills,
        routing=routing,
        prefilled_elsewhere=[bool(prefills)] * count,
        rng=rng,
        sessions=rng.integers(max(count // TURNS, 1), size=count).tolist(),
    )
    prefill, decode = simulation.build()
    simulation.send_first(requests, concurrency=concurrency)
    coming, transferred = simulation.coming, simulation.transferred
    while simulation.ended < count:
        until_s = coming_s = coming[0][0] if coming else math.inf
        if transferred and transferred[0][0] < until_s:
            until_s = transferred[0][0]
        if simulation.next_due_s() <= until_s:
            simulation.turn(until_s)
        elif transferred and transferred[0][0] <= coming_s:
            at_s, request = heapq.heappop(transferred)
            simulation.offer(request, at_s)
        else:
            simulation.arrive(prefill, decode)
    first_s: dict[int, float] = {}
    end_s: dict[int, float] = {}
    for rank in simulation.ranks:
        first_s |= rank.first_s
        end_s |= rank.end_s
    return Routed(
        served=Served.in_order(
            requests, arrived_s=simulation.arrived_s, first_s=first_s, end_s=end_s
        ),
        place_R=np.array([simulation.place[request] for request in range(count)]),
        hit_ratio=1.0 - len(simulation.misses) / count,
    )
