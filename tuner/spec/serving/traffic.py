"""The traffic of a serving goal: arrivals and lengths of requests.

    {concurrency: 256, input_tokens: 4000, output_tokens: 1000}   closed loop: as one request ends,
                                                                  the next begins
    {concurrency: 500, requests: 500, ...}                        all at once, and no more
    {rate: 20/s, arrival: {kind: gamma, cv: 1.5}, input_tokens: ..., output_tokens: ...}    open
    {trace: chat.csv}                                             replayed as recorded
    {trace: chat.csv, rate: 20/s}                                 replayed, time stretched to a rate
    {trace: chat.csv, rate: 20/s, arrival: {kind: poisson}}       lengths drawn from it in pairs
    {trace: chat.csv, concurrency: 256}                           the same in a closed loop; with
                                                                  prompt blocks in its order, each
                                                                  turn after the previous one

A recorded load is scaled by stretching time, never by dropping requests, which would change its
burstiness.

Not covered: daily cycles other than as a trace; in open loads, sessions whose next prompt waits for
the previous output.
"""

from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from profilers.records import Record
from tuner.spec.fields import Count, FilePath, Number, PerSecond, PositiveSeconds
from tuner.spec.serving.lengths import Lengths

MOST_CONCURRENT: Final = 1_000_000
MOST_REQUESTS: Final = 20_000
"""Most requests of a finite run; more are a long run."""


class ArrivalKind(StrEnum):
    """Arrival process of an open load."""

    POISSON = "poisson"
    """Poisson process."""
    CONSTANT = "constant"
    """Constant gaps."""
    GAMMA = "gamma"
    """Gamma-distributed gaps of the same mean: shape 1 / cv^2, scale cv^2 / rate (DistServe)."""
    ON_OFF = "on_off"
    """Poisson while on, none while off, both for exponential times (interrupted Poisson process;
    Kuczura, Bell System Technical Journal 52(3), 1973)."""


class Arrival(Record):
    """Arrival process of an open load; its mean rate is the traffic's."""

    kind: ArrivalKind = ArrivalKind.POISSON
    cv: Annotated[Number, Field(le=100.0)] | None = None
    """Standard deviation of the gaps over their mean, for `gamma`; 1 is Poisson, more is bursty."""
    on: PositiveSeconds | None = None
    """Mean duration of phases with requests, for `on_off`, seconds."""
    off: PositiveSeconds | None = None
    """Mean duration of phases without requests, for `on_off`, seconds."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        needed = {ArrivalKind.GAMMA: ("cv",), ArrivalKind.ON_OFF: ("on", "off")}.get(self.kind, ())
        for name in ("cv", "on", "off"):
            given = getattr(self, name) is not None
            if given and name not in needed:
                raise ValueError(f"{self.kind} arrivals have no {name!r}")
            if not given and name in needed:
                raise ValueError(f"{self.kind} arrivals need {name!r}")
        return self


class Traffic(Record):
    """The traffic to serve."""

    concurrency: Annotated[Count, Field(le=MOST_CONCURRENT)] | None = None
    """Concurrent requests: a closed loop."""
    rate: PerSecond | None = None
    """Mean requests per second of an open load."""
    requests: Annotated[Count, Field(le=MOST_REQUESTS)] | None = None
    """Number of requests of a finite run, as a benchmark sends them: throughput is that number over
    the time from the first arrival to the last end, start and drain included; absent: a long
    run."""
    arrival: Arrival | None = None
    """Arrival process; absent: Poisson, or as in the trace."""
    trace: FilePath | None = None
    """Recorded requests; formats in tuner/spec/serving/traces.py."""
    input_tokens: Lengths | None = None
    """Tokens of a prompt, its cached part included; absent with a trace."""
    output_tokens: Lengths | None = None
    """Output tokens; absent with a trace."""
    prefix_hit: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the prompt tokens that hit the prefix cache."""
    prefix_scope: Literal["session", "common"] = "session"
    """Origin of the cached prefix: `session`, an earlier request of the same session, so that one
    of several caches has it (each attention-data rank of each instance has a cache of its own);
    `common`, a prefix that all requests have and every cache holds."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.concurrency is not None and (self.rate, self.arrival) != (None, None):
            raise ValueError(
                "'concurrency' is a closed loop, 'rate' and 'arrival' an open load; keep one"
            )
        if self.concurrency is None and self.rate is None and self.trace is None:
            raise ValueError("one of 'concurrency', 'rate' or 'trace' is needed")
        if self.requests is not None and self.is_replayed:
            raise ValueError(
                "a replayed trace has its own number of requests; leave 'requests' out, or state"
                " 'concurrency' or 'arrival'"
            )
        if self.arrival is not None and self.rate is None:
            raise ValueError("'arrival' needs the mean 'rate' too, such as 20/s")
        for name in ("input_tokens", "output_tokens"):
            given = getattr(self, name) is not None
            if self.trace is None and not given:
                raise ValueError(
                    f"missing {name!r}; a number, or a distribution such as"
                    " {kind: lognormal, mean: 1000, cv: 1}"
                )
            if self.trace is not None and given:
                raise ValueError(f"the trace has its own {name!r}; leave it out")
        return self

    @property
    def is_closed_loop(self) -> bool:
        """Whether the load is a closed loop."""
        return self.concurrency is not None

    def scaled(self, share: float) -> "Traffic":
        """Return a share of the traffic: of its rate, its concurrency and its requests."""
        counts = {"concurrency": self.concurrency, "requests": self.requests}
        update: dict[str, float] = {
            name: max(1, round(share * count)) for name, count in counts.items() if count
        }
        if self.rate is not None:
            update["rate"] = share * self.rate
        return self.model_copy(update=update)

    @property
    def sets_its_rate(self) -> bool:
        """Whether throughput is what the servers reach, and not what comes in the long run."""
        return self.is_closed_loop or self.requests is not None

    @property
    def is_replayed(self) -> bool:
        """Whether arrivals are those of the trace, at its own rate or another."""
        return self.trace is not None and not self.is_closed_loop and self.arrival is None
