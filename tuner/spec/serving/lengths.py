"""Input and output lengths: the distributions in a spec, their means and quantiles.

    fixed          every request has `mean` tokens
    uniform        whole numbers from `low` to `high`, both included
    lognormal      mean m and coefficient of variation c: s^2 = ln(1 + c^2), mu = ln m - s^2 / 2
    pareto_tailed  the same, but the longest share p (`tail_ratio`) has a Pareto distribution:
                   P(X > x) = p (q / x)^a beyond the lognormal's (1 - p) quantile q; a: `tail_index`
    empirical      one of `values`, with probabilities by weight

The last two suit reasoning models, whose outputs have heavier tails than a lognormal; with a <= 2 a
Pareto tail has no finite variance, so plan for a quantile and not for a deviation. Every
distribution is truncated at `most`, like an engine's output limit, and rounded to at least 1 token;
means and quantiles are those before rounding, with truncation.

Source: the formulas are textbook (Johnson, Kotz and Balakrishnan, Continuous Univariate
Distributions, volume 1, chapters 14 and 20); for these shapes: Wang et al., BurstGPT, arXiv
2401.17644.

Not covered: correlation of input and output lengths; a trace file has pairs (traces.py).
"""

import math
from enum import StrEnum
from statistics import NormalDist
from typing import Annotated, Any, Final, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from profilers.records import Record
from tuner.bisection import bisect
from tuner.spec.fields import Number

LARGEST_TOKENS: Final = 2**21
"""Most tokens of one request; no model takes more, and traces are checked against it."""

Tokens = Annotated[int, Field(ge=1, le=LARGEST_TOKENS)]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_STANDARD: Final = NormalDist()
MEAN_FACTOR: Final = 50.0
"""Largest mean before truncation, in limits, of a law that is asked for by its truncated mean."""
HALVINGS: Final = 50


class LengthKind(StrEnum):
    """Kind of length distribution."""

    FIXED = "fixed"
    """Constant."""
    UNIFORM = "uniform"
    """Discrete uniform."""
    LOGNORMAL = "lognormal"
    """Lognormal, as in chat."""
    PARETO_TAILED = "pareto_tailed"
    """Lognormal with a heavy tail, as in outputs of reasoning models."""
    EMPIRICAL = "empirical"
    """Observed values."""


_NEEDED: Final = {
    LengthKind.FIXED: ("mean",),
    LengthKind.UNIFORM: ("low", "high"),
    LengthKind.LOGNORMAL: ("mean", "cv"),
    LengthKind.PARETO_TAILED: ("mean", "cv", "tail_ratio", "tail_index"),
    LengthKind.EMPIRICAL: ("values",),
}
_OPTIONAL: Final = {LengthKind.EMPIRICAL: ("weights",)}


class LengthLaw(Record):
    """Distribution of the tokens of a prompt, an output or a document."""

    kind: LengthKind
    low: Tokens | None = None
    """Fewest tokens of `uniform`."""
    high: Tokens | None = None
    """Most tokens of `uniform`."""
    mean: Annotated[Number, Field(ge=1.0, le=LARGEST_TOKENS)] | None = None
    """Mean of `fixed`, `lognormal`, and the lognormal whose tail `pareto_tailed` replaces."""
    cv: Annotated[Number, Field(le=100.0)] | None = None
    """Coefficient of variation of `lognormal`, and of the lognormal whose tail `pareto_tailed`
    replaces."""
    tail_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of requests in the tail of `pareto_tailed`."""
    tail_index: Annotated[float, Field(gt=1.0, le=100.0)] | None = None
    """Pareto exponent; the smaller, the heavier the tail. Above 1, so that the mean exists."""
    values: Annotated[tuple[Tokens, ...], Field(min_length=1, max_length=1_000_000)] | None = None
    """Observed token counts of `empirical`."""
    weights: tuple[Number, ...] | None = None
    """Relative frequency of each value; absent: equal."""
    most: Tokens = LARGEST_TOKENS
    """Most tokens; longer lengths are truncated."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        needed, optional = _NEEDED[self.kind], _OPTIONAL.get(self.kind, ())
        given = {name for names in _NEEDED.values() for name in names} | {"weights"}
        given = {name for name in given if getattr(self, name) is not None}
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"{self.kind} lengths need {missing[0]!r}; {_form(self.kind)}")
        if surplus := sorted(given - set(needed) - set(optional)):
            raise ValueError(f"{self.kind} lengths have no {surplus[0]!r}; {_form(self.kind)}")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low {self.low} exceeds high {self.high}")
        if self.weights is not None and len(self.weights) != len(self.values or ()):
            raise ValueError(f"{len(self.weights)} weights for {len(self.values or ())} values")
        return self


def _form(kind: LengthKind) -> str:
    fields = ", ".join(f"{name}: ..." for name in _NEEDED[kind])
    return f"write {{kind: {kind}, {fields}}}"


def _plain_number(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return {"kind": LengthKind.FIXED, "mean": value}
    return value


Lengths = Annotated[LengthLaw, BeforeValidator(_plain_number)]
"""A distribution, or a number of tokens."""


def mean_tokens(law: LengthLaw) -> float:
    """Return the mean of the truncated distribution, in tokens."""
    if law.kind is LengthKind.EMPIRICAL:
        values, shares = _empirical(law)
        return float(values @ shares)
    if law.kind is LengthKind.UNIFORM:
        low, high = _required(law.low), _required(law.high)
        within = range(int(low), int(min(high, law.most)) + 1)
        cut = high - max(low - 1, law.most)
        return (sum(within) + max(0.0, cut) * law.most) / (high - low + 1.0)
    if law.kind is LengthKind.FIXED:
        return min(_required(law.mean), law.most)
    return _skewed_mean(law)


def law_with_mean(mean: float, *, cv: float, most: int) -> LengthLaw:
    """Return the lognormal law whose mean is as stated once lengths are truncated."""

    def law(whole_mean: float) -> LengthLaw:
        return LengthLaw(kind=LengthKind.LOGNORMAL, mean=whole_mean, cv=cv, most=most)

    if mean >= most:
        return LengthLaw(kind=LengthKind.FIXED, mean=most)
    longest = min(MEAN_FACTOR * most, float(LARGEST_TOKENS))
    return law(
        bisect(lambda tried: mean_tokens(law(tried)) >= mean, mean, longest, halvings=HALVINGS)
    )


def quantile_tokens(law: LengthLaw, *, ratio: float) -> float:
    """Return the length that a share `ratio` of requests does not exceed, in tokens."""
    if not 0.0 < ratio < 1.0:
        raise ValueError(f"a quantile lies strictly between 0 and 1, not at {ratio}")
    if law.kind is LengthKind.EMPIRICAL:
        values, shares = _empirical(law)
        reached = int(np.searchsorted(np.cumsum(shares), ratio * (1.0 - 1e-12)))
        return float(values[min(reached, len(values) - 1)])
    if law.kind is LengthKind.UNIFORM:
        low, high = _required(law.low), _required(law.high)
        return min(low + math.ceil(ratio * (high - low + 1.0)) - 1.0, law.most)
    if law.kind is LengthKind.FIXED:
        return min(_required(law.mean), law.most)
    mu, sigma = _log_parameters(law)
    if law.kind is LengthKind.PARETO_TAILED and ratio > 1.0 - _required(law.tail_ratio):
        beyond = math.pow(
            _required(law.tail_ratio) / (1.0 - ratio), 1.0 / _required(law.tail_index)
        )
        return min(_tail_start(law) * beyond, float(law.most))
    return min(math.exp(mu + sigma * _STANDARD.inv_cdf(ratio)), float(law.most))


def sample_tokens(law: LengthLaw, *, count: int, rng: np.random.Generator) -> Ints:
    """Draw lengths; the same generator state gives the same lengths."""
    if law.kind is LengthKind.EMPIRICAL:
        values, shares = _empirical(law)
        return rng.choice(values, size=count, p=shares).astype(np.int64)
    if law.kind is LengthKind.UNIFORM:
        drawn = rng.integers(int(_required(law.low)), int(_required(law.high)) + 1, size=count)
        return np.minimum(drawn, law.most).astype(np.int64)
    if law.kind is LengthKind.FIXED:
        return np.full(count, int(min(_required(law.mean), law.most)), dtype=np.int64)
    mu, sigma = _log_parameters(law)
    drawn_N = rng.lognormal(mu, sigma, size=count)
    if law.kind is LengthKind.PARETO_TAILED:
        # Values beyond the quantile, a share `tail_ratio`, are redrawn from the tail.
        start = _tail_start(law)
        tail_N = start * (1.0 - rng.random(count)) ** (-1.0 / _required(law.tail_index))
        drawn_N = np.where(drawn_N > start, tail_N, drawn_N)
    return np.clip(np.rint(drawn_N), 1, law.most).astype(np.int64)


def _skewed_mean(law: LengthLaw) -> float:
    """E[min(X, most)]: the lognormal's part below truncation or tail, and the rest."""
    mu, sigma = _log_parameters(law)
    longest, mean = float(law.most), _required(law.mean)
    has_tail = law.kind is LengthKind.PARETO_TAILED and _tail_start(law) < longest
    limit = _tail_start(law) if has_tail else longest
    below = mean * _STANDARD.cdf((math.log(limit) - mu - sigma**2) / sigma)
    if not has_tail:
        return below + longest * (1.0 - _STANDARD.cdf((math.log(limit) - mu) / sigma))
    a = _required(law.tail_index)
    # Pareto's E[min(X, m)] = q a / (a - 1) - q / (a - 1) (q / m)^(a - 1)
    tail = limit * (a - math.pow(limit / longest, a - 1.0)) / (a - 1.0)
    return below + _required(law.tail_ratio) * tail


def _log_parameters(law: LengthLaw) -> tuple[float, float]:
    variance = math.log1p(_required(law.cv) ** 2)
    return math.log(_required(law.mean)) - variance / 2.0, math.sqrt(variance)


def _tail_start(law: LengthLaw) -> float:
    mu, sigma = _log_parameters(law)
    return math.exp(mu + sigma * _STANDARD.inv_cdf(1.0 - _required(law.tail_ratio)))


def _empirical(law: LengthLaw) -> tuple[Floats, Floats]:
    """Values in ascending order, truncated, and the share of each."""
    values = np.minimum(np.array(law.values, dtype=np.float64), law.most)
    weights = np.array(law.weights or [1.0] * len(values), dtype=np.float64)
    order = np.argsort(values, kind="stable")
    return values[order], weights[order] / weights.sum()


def _required(value: float | None) -> float:
    """Unwrap a field that validation requires for the kind."""
    assert value is not None
    return float(value)
