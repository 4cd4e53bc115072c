"""Factors on predicted latencies, shrunk towards one unless several models agree.

    r = median over a model's rows of log(measured / predicted)      u = median of r over models
    factor = exp(u * max(0, 1 - s^2 / u^2)),  s = max(1.4826 * median |r - u|, 0.05)

This is the positive-part James-Stein estimator (Proc. 4th Berkeley Symposium, 1961) with robust
moments: one model says little about the next, so a factor counts only as far as it exceeds the
spread between models, and never from one model. Five per cent is the variation between releases.

Letters: N rows. Not covered: factors by size or strategy; there are too few models to tell them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from tuner.backtest.serving.residuals import (
    ServingFactors,
    ServingResiduals,
    factor_key,
    scale_latency,
)
from tuner.backtest.serving.scores import Pair, tpot, ttft

LEAST_SPREAD: Final = 0.05
LEAST_MODELS: Final = 2
NORMAL_SPREAD: Final = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """Logarithms of measured over predicted seconds."""

    tpot: float
    ttft: float


def fit(pairs: Sequence[Pair], *, origin: str) -> ServingResiduals:
    """Fit the factors of every engine and harness."""
    factors = {}
    for key in sorted({factor_key(pair.launch) for pair in pairs}):
        key_pairs = [pair for pair in pairs if factor_key(pair.launch) == key]
        logs = _shrunk_logs(key_pairs)
        factors[key] = ServingFactors(
            tpot=float(np.exp(logs.tpot)),
            ttft=float(np.exp(logs.ttft)),
            models=len({pair.launch.decoder.name for pair in key_pairs}),
            rows=len(key_pairs),
        )
    return ServingResiduals(origin=origin, factors=factors)


def held_out(pairs: Sequence[Pair]) -> list[Pair]:
    """Predict every row with factors from the other models of its engine and harness."""
    known: dict[tuple[str, str], Logs] = {}
    corrected = []
    for pair in pairs:
        key, model = factor_key(pair.launch), pair.launch.decoder.name
        if (key, model) not in known:
            others = [
                candidate
                for candidate in pairs
                if factor_key(candidate.launch) == key and candidate.launch.decoder.name != model
            ]
            known[key, model] = _shrunk_logs(others)
        corrected.append(_correct(pair, known[key, model]))
    return corrected


def _logs(pair: Pair) -> Logs:
    (predicted_tpot, measured_tpot), (predicted_ttft, measured_ttft) = tpot(pair), ttft(pair)
    return Logs(
        tpot=float(np.log(measured_tpot / predicted_tpot)),
        ttft=float(np.log(measured_ttft / predicted_ttft)),
    )


def _correct(pair: Pair, logs: Logs) -> Pair:
    latency = scale_latency(
        pair.latency, tpot=float(np.exp(logs.tpot)), ttft=float(np.exp(logs.ttft))
    )
    return Pair(launch=pair.launch, latency=latency)


def _shrunk_logs(pairs: Sequence[Pair]) -> Logs:
    by_model: dict[str, list[Logs]] = {}
    for pair in pairs:
        by_model.setdefault(pair.launch.decoder.name, []).append(_logs(pair))
    return Logs(
        tpot=_shrink([median(log.tpot for log in logs) for logs in by_model.values()]),
        ttft=_shrink([median(log.ttft for log in logs) for logs in by_model.values()]),
    )


def _shrink(residuals: Sequence[float]) -> float:
    if len(residuals) < LEAST_MODELS:
        return 0.0
    middle = median(residuals)
    spread = NORMAL_SPREAD * median(abs(residual - middle) for residual in residuals)
    if middle == 0.0:
        return 0.0
    return middle * max(0.0, 1.0 - (max(spread, LEAST_SPREAD) / middle) ** 2)
