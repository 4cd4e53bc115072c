"""The requests of a deployment: how they arrive and how long they are.

closed loop   a fixed number of requests is always running
open          requests arrive on their own, at a rate
trace         arrivals and lengths of recorded requests
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from profilers.records import Record
from tuner.spec.fields import Count, FilePath, Number, PositiveSeconds
from tuner.units import parse_per_s


def _rate(value: Any) -> Any:
    return parse_per_s(value) if isinstance(value, str) else value


Rate = Annotated[float, Field(gt=0.0, allow_inf_nan=False), BeforeValidator(_rate)]
"""Per second; in a file with its unit, e.g. `20/s`."""

Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class Lengths(Record):
    """A distribution of token counts."""

    kind: Literal["fixed", "uniform", "lognormal", "pareto"] = "fixed"
    mean: Number
    """Of fixed, uniform, lognormal; of pareto too."""
    low_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Uniform: least length over the mean's counterpart, the greatest."""
    sigma: Number = 1.0
    """Lognormal: standard deviation of the logarithm."""
    tail: Annotated[float, Field(gt=1.0)] = 2.5
    """Pareto: exponent of the tail."""
    most: Count | None = None
    """Longer ones are cut."""


def _lengths(value: Any) -> Any:
    return {"mean": value} if isinstance(value, int | float) else value


LengthsOrCount = Annotated[Lengths, BeforeValidator(_lengths)]


class Arrival(Record):
    """How open requests arrive."""

    kind: Literal["poisson", "gamma", "on_off", "constant"] = "poisson"
    cv: Number = 1.0
    """Gamma: standard deviation over mean of the gaps."""
    on: PositiveSeconds | None = None
    """On-off: mean length of a busy stretch."""
    off: PositiveSeconds | None = None
    """On-off: mean length of a quiet one."""


class Traffic(Record):
    """Exactly one of concurrency, rate and trace."""

    concurrency: Count | None = None
    """Closed loop: requests that always run."""
    rate: Rate | None = None
    """Open: requests a second."""
    arrival: Arrival = Arrival()
    trace: FilePath | None = None
    """Recorded requests: Azure CSV, BurstGPT CSV or Mooncake JSONL."""
    rate_factor: Number = 1.0
    """Trace: how many times faster it is replayed."""
    input_tokens: LengthsOrCount | None = None
    output_tokens: LengthsOrCount | None = None
    prefix_hit: Share = 0.0
    """Share of the prompt whose KV cache is already there."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        named = [n for n in ("concurrency", "rate", "trace") if getattr(self, n) is not None]
        if len(named) != 1:
            raise ValueError(
                f"{' and '.join(named) or 'nothing'} said; name one of concurrency, rate, trace"
            )
        if self.trace is None and (self.input_tokens is None or self.output_tokens is None):
            raise ValueError("input_tokens and output_tokens are needed without a trace")
        if self.arrival.kind == "on_off" and None in (self.arrival.on, self.arrival.off):
            raise ValueError("arrival on_off needs on and off")
        return self
