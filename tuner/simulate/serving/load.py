"""Requests: how long they are and when they come.

A closed loop keeps C requests in flight: C are sent at once, and each request that ends sends the
next. Turns of a session stay in order: one whose earlier turn has not ended is passed over until it
has, and comes before all that were not sent by then. Open arrivals come at stated times, whatever
has become of those before.

Letters: R requests.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Requests:
    """Requests in order of arrival."""

    input_R: npt.NDArray[np.int64]
    """Tokens of the prompt."""
    output_R: npt.NDArray[np.int64]
    """Output tokens."""
    arrival_s_R: npt.NDArray[np.float64] | None = None
    """Seconds of arrival, not descending; None: a closed loop."""
    delay_s_R: npt.NDArray[np.float64] | None = None
    """Seconds from the end of the request before (or the start) until it is sent, in a closed
    loop."""
    prefilled_R: npt.NDArray[np.bool_] | None = None
    """Whether the prompt was prefilled elsewhere: it arrives with its cache; None: none was."""
    cached_R: npt.NDArray[np.int64] | None = None
    """Tokens of the prompt that are in the prefix cache and need not be computed; None: none."""

    after_R: npt.NDArray[np.int64] | None = None
    """Earlier request that each is the next turn of, in a closed loop, -1: of none; None: no
    sessions are known."""

    @property
    def cached(self) -> list[int]:
        """Return cached tokens by request, as a list: single entries of arrays are slow to read."""
        return [0] * len(self.input_R) if self.cached_R is None else self.cached_R.tolist()

    @property
    def delays_s(self) -> list[float]:
        """Return delays by request, as a list: single entries of arrays are slow to read."""
        return [0.0] * len(self.input_R) if self.delay_s_R is None else self.delay_s_R.tolist()

    @property
    def prefilled_elsewhere(self) -> list[bool]:
        """Return `prefilled_R` as a list: single entries of arrays are slow to read."""
        return (
            [False] * len(self.input_R) if self.prefilled_R is None else self.prefilled_R.tolist()
        )

    def __post_init__(self) -> None:
        if not len(self.input_R) == len(self.output_R) > 0:
            raise ValueError("requests need as many inputs as outputs, and one at least")
        if self.input_R.min() < 1 or self.output_R.min() < 1:
            raise ValueError("a request has at least one token of either kind")
        if self.prefilled_R is not None and len(self.prefilled_R) != len(self.input_R):
            raise ValueError("every request is read here or elsewhere")
        if self.cached_R is not None and (
            len(self.cached_R) != len(self.input_R)
            or self.cached_R.min() < 0
            or (self.cached_R >= self.input_R).any()
        ):
            raise ValueError("of every prompt one token at least must be computed")
        if self.after_R is not None and (self.after_R >= np.arange(len(self.after_R))).any():
            raise ValueError("a turn comes after the one before")
        if self.arrival_s_R is not None and (np.diff(self.arrival_s_R) < 0.0).any():
            raise ValueError("arrivals must not go back in time")


class ClosedLoop:
    """Requests that a closed loop sends first, and next when one has ended."""

    def __init__(self, requests: Requests, *, concurrency: int) -> None:
        self._count = len(requests.input_R)
        self._after = None if requests.after_R is None else requests.after_R.tolist()
        self._free = concurrency
        self._next = 0
        self._ended: set[int] = set()
        self._passed: dict[int, list[int]] = {}
        """Turns that were passed over, by the request that they wait for."""
        self._ready: list[int] = []
        """Heap of passed-over turns whose earlier turn has ended since."""

    def first(self) -> list[int]:
        """Return the requests that are sent at once."""
        return list(self._sent())

    def ended(self, request: int) -> list[int]:
        """Return the requests that are sent as one ends."""
        if self._after is not None:
            self._ended.add(request)
            for turn in self._passed.pop(request, ()):
                heapq.heappush(self._ready, turn)
        self._free += 1
        return list(self._sent())

    def _sent(self) -> Iterator[int]:
        while self._free and (self._ready or self._next < self._count):
            request = self._candidate()
            if request is not None:
                self._free -= 1
                yield request

    def _candidate(self) -> int | None:
        """Return the next request; None where it must wait for an earlier turn."""
        if self._ready:
            return heapq.heappop(self._ready)
        request = self._next
        self._next += 1
        before = -1 if self._after is None else self._after[request]
        if before < 0 or before in self._ended:
            return request
        self._passed.setdefault(before, []).append(request)
        return None


def of_a_peer(requests: Requests, *, rng: np.random.Generator) -> Requests:
    """Return requests of the same lengths and gaps in another order; sessions stay as they are."""
    if requests.after_R is not None:
        return requests
    order_R = rng.permutation(len(requests.input_R))
    arrival_s_R = requests.arrival_s_R
    if arrival_s_R is not None:
        arrival_s_R = np.cumsum(rng.permutation(np.diff(arrival_s_R, prepend=0.0)))
    delay, prefilled, cached = requests.delay_s_R, requests.prefilled_R, requests.cached_R
    return Requests(
        input_R=requests.input_R[order_R],
        output_R=requests.output_R[order_R],
        arrival_s_R=arrival_s_R,
        delay_s_R=None if delay is None else delay[order_R],
        prefilled_R=None if prefilled is None else prefilled[order_R],
        cached_R=None if cached is None else cached[order_R],
    )


def uniform_requests(
    count: int,
    *,
    input_tokens: int,
    output_tokens: int,
    least_ratio: float,
    delay_s: float = 0.0,
    seed: int,
) -> Requests:
    """Draw lengths evenly from `least_ratio` to 1 of the nominal ones, delays exponentially.

    Every quantile of a length is drawn once and shuffled, so that the mean does not depend on the
    seed.
    """
    rng = np.random.default_rng(seed)
    quantile_R = (np.arange(count) + 0.5) / count
    drawn = []
    for nominal in (input_tokens, output_tokens):
        share_R = least_ratio + (1.0 - least_ratio) * rng.permutation(quantile_R)
        drawn.append(np.maximum(np.rint(nominal * share_R), 1).astype(np.int64))
    delay_s_R = rng.exponential(delay_s, count) if delay_s > 0.0 else None
    return Requests(input_R=drawn[0], output_R=drawn[1], delay_s_R=delay_s_R)


@dataclass(slots=True, kw_only=True)
class SentRequests:
    """Requests that simulated servers get, and their times so far."""

    inputs: list[int]
    outputs: list[int]
    cached: list[int]
    """Tokens of prompts that need not be computed."""
    prefilled_elsewhere: list[bool]
    delays_s: list[float]
    """Seconds before each request of a closed loop is sent."""
    loop: ClosedLoop | None = None
    """Closed loop that sends the requests; None: arrivals are stated, or sent by a router."""
    coming: list[tuple[float, int]] = field(default_factory=list)
    """Heap: when requests arrive."""
    arrived_s: dict[int, float] = field(default_factory=dict)
    first_s: dict[int, float] = field(default_factory=dict)
    end_s: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, requests: Requests, **simulated: Any) -> Self:
        """Return requests before the first is sent, with the other fields of a simulation."""
        simulated.setdefault("prefilled_elsewhere", requests.prefilled_elsewhere)
        return cls(
            inputs=requests.input_R.tolist(),
            outputs=requests.output_R.tolist(),
            cached=requests.cached,
            delays_s=requests.delays_s,
            **simulated,
        )

    def send_first(self, requests: Requests, *, concurrency: int) -> None:
        """Send the requests at their stated times, or the first of a closed loop."""
        if requests.arrival_s_R is None:
            self.loop = ClosedLoop(requests, concurrency=concurrency)
            for request in self.loop.first():
                self.send(request, self.delays_s[request])
        else:
            for request, at_s in enumerate(requests.arrival_s_R.tolist()):
                self.send(request, at_s)

    def send(self, request: int, at_s: float) -> None:
        """Let a request come at that time."""
        heapq.heappush(self.coming, (at_s, request))

    def send_after(self, request: int, end_s: float) -> None:
        """Send what a closed loop sends as a request ends."""
        for after in () if self.loop is None else self.loop.ended(request):
            self.send(after, end_s + self.delays_s[after])


@dataclass(slots=True, kw_only=True)
class RunningSequences(SentRequests):
    """Requests on one clock, of which the running ones get tokens at every step together."""

    now_s: float = 0.0
    step: int = 0
    """Steps that running sequences took part in."""
    running: list[tuple[int, int]] = field(default_factory=list)
    """Heap of (step of the last token, request)."""
    past: float = 0.0
    """Tokens in the cache of all running sequences."""

    def served(self, requests: Requests) -> "Served":
        """Return the times of all requests."""
        return Served.in_order(
            requests, arrived_s=self.arrived_s, first_s=self.first_s, end_s=self.end_s
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """Times of served requests, in order of arrival; seconds from the first arrival on."""

    arrival_s_R: npt.NDArray[np.float64]
    first_token_s_R: npt.NDArray[np.float64]
    end_s_R: npt.NDArray[np.float64]
    output_R: npt.NDArray[np.int64]

    @classmethod
    def in_order(
        cls,
        requests: Requests,
        *,
        arrived_s: Mapping[int, float],
        first_s: Mapping[int, float],
        end_s: Mapping[int, float],
    ) -> Self:
        """Put the times of a simulation in order of requests."""
        numbers = range(len(requests.input_R))
        return cls(
            arrival_s_R=np.array([arrived_s[request] for request in numbers]),
            first_token_s_R=np.array([first_s[request] for request in numbers]),
            end_s_R=np.array([end_s[request] for request in numbers]),
            output_R=requests.output_R,
        )

    @property
    def ttft_s_R(self) -> npt.NDArray[np.float64]:
        """Return the seconds from arrival to the first token."""
        return self.first_token_s_R - self.arrival_s_R

    @property
    def tpot_s_R(self) -> npt.NDArray[np.float64]:
        """Return the seconds per token after the first.

        Outputs of one token have none and are left out.
        """
        several_R = self.output_R > 1
        span_s = self.end_s_R[several_R] - self.first_token_s_R[several_R]
        return span_s / (self.output_R[several_R] - 1)
