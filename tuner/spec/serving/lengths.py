"""How long prompts and answers are: the laws that a spec may name, their means and their tails.

    fixed          every request has `mean` tokens
    uniform        whole numbers from `low` to `high`, both included
    lognormal      mean m and coefficient of variation c: s^2 = ln(1 + c^2), mu = ln m - s^2 / 2
    pareto_tailed  the same, but the longest share p (`tail_ratio`) follow Pareto's law instead:
                   P(X > x) = p (q / x)^a beyond the lognormal's (1 - p) quantile q; a: `tail_index`
    empirical      one of `values`, each as likely as its weight says

The last two suit reasoning models, whose answers have tails that no lognormal of their mean holds;
with a <= 2 a Pareto tail has no finite variance, so plan for a quantile and not for a deviation.
Every law is cut at `most`, as an engine cuts at its longest answer, and rounded to at least 1
token; means and quantiles are those of the law before rounding, cut included.

Source: the formulas are textbook (Johnson, Kotz and Balakrishnan, Continuous Univariate
Distributions, volume 1, chapters 14 and 20); that lengths are so shaped: Wang et al., BurstGPT,
arXiv 2401.17644.

Not covered: prompts and answers that go together; a trace file has them as pairs (traces.py).
"""

import math
from enum import StrEnum
from statistics import NormalDist
from typing import Annotated, Any, Final, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from profilers.records import Record
from tuner.spec.fields import Number

LARGEST_TOKENS: Final = 2**21
"""Tokens of one request; no model that is served takes more, and traces are checked against it."""

Tokens = Annotated[int, Field(ge=1, le=LARGEST_TOKENS)]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_STANDARD: Final = NormalDist()


class LengthKind(StrEnum):
    """How lengths are distributed."""

    FIXED = "fixed"
    """Always the same."""
    UNIFORM = "uniform"
    """Any whole number of a range alike."""
    LOGNORMAL = "lognormal"
    """Skewed, as chat is."""
    PARETO_TAILED = "pareto_tailed"
    """Lognormal with a heavy tail, as answers of reasoning models are."""
    EMPIRICAL = "empirical"
    """Values that were seen."""


_NEEDED: Final = {
    LengthKind.FIXED: ("mean",),
    LengthKind.UNIFORM: ("low", "high"),
    LengthKind.LOGNORMAL: ("mean", "cv"),
    LengthKind.PARETO_TAILED: ("mean", "cv", "tail_ratio", "tail_index"),
    LengthKind.EMPIRICAL: ("values",),
}
_OPTIONAL: Final = {LengthKind.EMPIRICAL: ("weights",)}


class LengthLaw(Record):
    """How many tokens a prompt or an answer has."""

    kind: LengthKind
    low: Tokens | None = None
    """Fewest tokens of `uniform`."""
    high: Tokens | None = None
    """Most tokens of `uniform`."""
    mean: Annotated[Number, Field(ge=1.0, le=LARGEST_TOKENS)] | None = None
    """Mean of `fixed`, `lognormal`, and the lognormal whose tail `pareto_tailed` replaces."""
    cv: Annotated[Number, Field(le=100.0)] | None = None
    """Standard deviation over mean of the same."""
    tail_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of requests in the tail of `pareto_tailed`."""
    tail_index: Annotated[float, Field(gt=1.0, le=100.0)] | None = None
    """Pareto's exponent; the smaller, the heavier. Above 1, since the mean must exist."""
    values: Annotated[tuple[Tokens, ...], Field(min_length=1, max_length=1_000_000)] | None = None
    """Tokens that were seen, of `empirical`."""
    weights: tuple[Number, ...] | None = None
    """How often each value occurs, relative to the others; absent: all alike."""
    most: Tokens = LARGEST_TOKENS
    """Longer lengths are cut here."""

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
"""A law, or a bare number of tokens."""


def mean_tokens(law: LengthLaw) -> float:
    """Return the mean of the cut law, in tokens."""
    if law.kind is LengthKind.EMPIRICAL:
        values, shares = _empirical(law)
        return float(values @ shares)
    if law.kind is LengthKind.UNIFORM:
        low, high = _of(law.low), _of(law.high)
        within = range(int(low), int(min(high, law.most)) + 1)
        cut = high - max(low - 1, law.most)
        return (sum(within) + max(0.0, cut) * law.most) / (high - low + 1.0)
    if law.kind is LengthKind.FIXED:
        return min(_of(law.mean), law.most)
    return _skewed_mean(law)


def quantile_tokens(law: LengthLaw, *, ratio: float) -> float:
    """Return the length that a share `ratio` of requests does not exceed, in tokens."""
    if not 0.0 < ratio < 1.0:
        raise ValueError(f"a quantile lies strictly between 0 and 1, not at {ratio}")
    if law.kind is LengthKind.EMPIRICAL:
        values, shares = _empirical(law)
        reached = int(np.searchsorted(np.cumsum(shares), ratio * (1.0 - 1e-12)))
        return float(values[min(reached, len(values) - 1)])
    if law.kind is LengthKind.UNIFORM:
        low, high = _of(law.low), _of(law.high)
        return min(low + math.ceil(ratio * (high - low + 1.0)) - 1.0, law.most)
    if law.kind is LengthKind.FIXED:
        return min(_of(law.mean), law.most)
    mu, sigma = _log_parameters(law)
    if law.kind is LengthKind.PARETO_TAILED and ratio > 1.0 - _of(law.tail_ratio):
        beyond = math.pow(_of(law.tail_ratio) / (1.0 - ratio), 1.0 / _of(law.tail_index))
        return min(_tail_start(law) * beyond, float(law.most))
    return min(math.exp(mu + sigma * _STANDARD.inv_cdf(ratio)), float(law.most))


def sample_tokens(law: LengthLaw, *, count: int, rng: np.random.Generator) -> Ints:
    """Draw lengths; the same generator state gives the same lengths."""
    if law.kind is LengthKind.EMPIRICAL:
        values, shares = _empirical(law)
        return rng.choice(values, size=count, p=shares).astype(np.int64)
    if law.kind is LengthKind.UNIFORM:
        drawn = rng.integers(int(_of(law.low)), int(_of(law.high)) + 1, size=count)
        return np.minimum(drawn, law.most).astype(np.int64)
    if law.kind is LengthKind.FIXED:
        return np.full(count, int(min(_of(law.mean), law.most)), dtype=np.int64)
    mu, sigma = _log_parameters(law)
    drawn_N = rng.lognormal(mu, sigma, size=count)
    if law.kind is LengthKind.PARETO_TAILED:
        # What lies beyond the quantile is a share `tail_ratio`, and is drawn again from the tail.
        start = _tail_start(law)
        tail_N = start * (1.0 - rng.random(count)) ** (-1.0 / _of(law.tail_index))
        drawn_N = np.where(drawn_N > start, tail_N, drawn_N)
    return np.clip(np.rint(drawn_N), 1, law.most).astype(np.int64)


def _skewed_mean(law: LengthLaw) -> float:
    """E[min(X, most)]: the lognormal's part below the cut or the tail, and what is beyond."""
    mu, sigma = _log_parameters(law)
    most, mean = float(law.most), _of(law.mean)
    has_tail = law.kind is LengthKind.PARETO_TAILED and _tail_start(law) < most
    limit = _tail_start(law) if has_tail else most
    below = mean * _STANDARD.cdf((math.log(limit) - mu - sigma**2) / sigma)
    if not has_tail:
        return below + most * (1.0 - _STANDARD.cdf((math.log(limit) - mu) / sigma))
    a = _of(law.tail_index)
    # Pareto's E[min(X, m)] = q a / (a - 1) - q / (a - 1) (q / m)^(a - 1)
    tail = limit * (a - math.pow(limit / most, a - 1.0)) / (a - 1.0)
    return below + _of(law.tail_ratio) * tail


def _log_parameters(law: LengthLaw) -> tuple[float, float]:
    variance = math.log1p(_of(law.cv) ** 2)
    return math.log(_of(law.mean)) - variance / 2.0, math.sqrt(variance)


def _tail_start(law: LengthLaw) -> float:
    mu, sigma = _log_parameters(law)
    return math.exp(mu + sigma * _STANDARD.inv_cdf(1.0 - _of(law.tail_ratio)))


def _empirical(law: LengthLaw) -> tuple[Floats, Floats]:
    """Values in rising order, cut, and the share of each."""
    values = np.minimum(np.array(law.values, dtype=np.float64), law.most)
    weights = np.array(law.weights or [1.0] * len(values), dtype=np.float64)
    order = np.argsort(values, kind="stable")
    return values[order], weights[order] / weights.sum()


def _of(value: float | None) -> float:
    """Unwrap a field that the law's kind has; validation saw to it."""
    assert value is not None
    return float(value)
