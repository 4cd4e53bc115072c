"""Residuals of predicted latencies, held to one unless models agree that they are not.

    r = median over a model's rows of log(measured / predicted)      u = median of r over models
    factor = exp(u * max(0, 1 - s^2 / u^2)),  s = max(1.4826 * median |r - u|, 0.05)

This is the positive-part James-Stein estimator (Proc. 4th Berkeley Symposium, 1961) with robust
moments: what one model shows says little about the next, so that a factor is kept only as far as it
stands out of the spread between models, and never from one model alone. Five per cent is what a
release moves by itself.

After a few launches of the very model, system and engine the spread between models is no matter:
the median residual of k launches counts with weight k / (k + 1).

Letters: N rows. Not covered: factors by size or strategy; there are too few models to tell them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from tuner.backtest.serving.residuals import ServingFactors, ServingResiduals, key_of, scaled
from tuner.backtest.serving.scores import Pair, tpot, ttft

LEAST_SPREAD: Final = 0.05
LEAST_MODELS: Final = 2
NORMAL_SPREAD: Final = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
PRIOR_LAUNCHES: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """Logarithms of measured over predicted seconds."""

    tpot: float
    ttft: float


def fit(pairs: Sequence[Pair], *, origin: str) -> ServingResiduals:
    """Fit the factors of every engine and harness."""
    factors = {}
    for key in sorted({key_of(pair.launch) for pair in pairs}):
        own = [pair for pair in pairs if key_of(pair.launch) == key]
        found = _shrunken(own)
        factors[key] = ServingFactors(
            tpot=float(np.exp(found.tpot)),
            ttft=float(np.exp(found.ttft)),
            models=len({pair.launch.decoder.name for pair in own}),
            rows=len(own),
        )
    return ServingResiduals(origin=origin, factors=factors)


def held_out(pairs: Sequence[Pair]) -> list[Pair]:
    """Predict every row with factors from the other models of its engine and harness."""
    known: dict[tuple[str, str], Logs] = {}
    corrected = []
    for pair in pairs:
        key, model = key_of(pair.launch), pair.launch.decoder.name
        if (key, model) not in known:
            others = [
                other
                for other in pairs
                if key_of(other.launch) == key and other.launch.decoder.name != model
            ]
            known[key, model] = _shrunken(others)
        corrected.append(_corrected(pair, known[key, model]))
    return corrected


def after_launches(pairs: Sequence[Pair], *, launches: int, draws: int, seed: int) -> list[Pair]:
    """Predict every row after some other launches of its model, system and engine, drawn anew.

    Rows with fewer others than that are left out.
    """
    rng = np.random.default_rng(seed)
    groups: dict[tuple[str, ...], list[Pair]] = {}
    for pair in pairs:
        launch = pair.launch
        name = (launch.decoder.name, launch.system, launch.engine.value)
        groups.setdefault(name, []).append(pair)
    corrected = []
    weight = launches / (launches + PRIOR_LAUNCHES)
    for own in groups.values():
        if len(own) <= launches:
            continue
        logs = [_logs(pair) for pair in own]
        for number, pair in enumerate(own):
            others = [other for other in range(len(own)) if other != number]
            for _ in range(draws):
                drawn = [logs[i] for i in rng.choice(others, launches, replace=False)]
                found = Logs(
                    tpot=weight * median(log.tpot for log in drawn),
                    ttft=weight * median(log.ttft for log in drawn),
                )
                corrected.append(_corrected(pair, found))
    return corrected


def _logs(pair: Pair) -> Logs:
    (predicted_tpot, measured_tpot), (predicted_ttft, measured_ttft) = tpot(pair), ttft(pair)
    return Logs(
        tpot=float(np.log(measured_tpot / predicted_tpot)),
        ttft=float(np.log(measured_ttft / predicted_ttft)),
    )


def _corrected(pair: Pair, logs: Logs) -> Pair:
    latency = scaled(pair.latency, tpot=float(np.exp(logs.tpot)), ttft=float(np.exp(logs.ttft)))
    return Pair(launch=pair.launch, latency=latency)


def _shrunken(pairs: Sequence[Pair]) -> Logs:
    by_model: dict[str, list[Logs]] = {}
    for pair in pairs:
        by_model.setdefault(pair.launch.decoder.name, []).append(_logs(pair))
    return Logs(
        tpot=_shrunk([median(log.tpot for log in logs) for logs in by_model.values()]),
        ttft=_shrunk([median(log.ttft for log in logs) for logs in by_model.values()]),
    )


def _shrunk(residuals: Sequence[float]) -> float:
    if len(residuals) < LEAST_MODELS:
        return 0.0
    middle = median(residuals)
    spread = NORMAL_SPREAD * median(abs(one - middle) for one in residuals)
    if middle == 0.0:
        return 0.0
    return middle * max(0.0, 1.0 - (max(spread, LEAST_SPREAD) / middle) ** 2)
