"""Bands of TTFT and TPOT for a new pair (model, engine), from pairs that were left out.

Errors of one pair are related, so that deciles of rows say how far the next row of a known pair
lies and little about the first row of a new one. Pairs are therefore what counts: every pair
weighs one, however many rows it has, and the band of a new pair comes from the other pairs as they
are predicted by whoever has not seen them (`published_serving.as_unseen`).

    of the same engine                      1
    of another engine                       OTHER_ENGINE times
    the pair itself, where it has rows      OWN_PAIR times

    TTFT    quantiles (1 - a) / 2 and (1 + a) / 2 of log(measured / predicted), which lean upwards
    TPOT    -q and q, q the quantile a of its size, which are even

`a` is the least level at which rows of a pair that was left out are inside four times in five,
pairs weighing the same, raised for an engine until its own pairs are seven times in ten: group-wise
conformal prediction (Vovk et al., "Algorithmic Learning in a Random World", 2005). The correction
for a finite number of groups is found by leaving out rather than from their number, which for nine
pairs would ask for the worst of them.

Widenings: every release of an engine, every generation of devices, and every mode is left out in
turn; the bands of the pairs in it come from all other rows. With e how far a row lies outside of
its band, in logarithms and negative inside, what was left out costs the quantile four in five of e
over its rows, pairs weighing the same. The next group costs at most what the one of rank
ceil(4/5 (n + 1)) of n did, the most expensive of two (split conformal prediction over groups).

Ratios: of two layouts of one model, engine, system, release, formats, driver, lengths and
concurrency, the size of log(measured ratio / predicted ratio); pairs weigh the same, and so do
the settings within a pair.

Letters: C rows, P ratios.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

import numpy as np
import numpy.typing as npt

from tests.benchmarks.published_serving import Harness
from tuner.backtest.serving.launches import PublishedLaunch
from tuner.backtest.serving.prediction import MeanLatency
from tuner.costs.serve.bands import (
    Coverage,
    Edges,
    Kernels,
    Lacking,
    LatencyRatioBand,
    PublishedMode,
    StoredBand,
    Widening,
)
from tuner.spec.serving.goal import EngineName

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

STATED: Final = 0.8
LEAST_OF_ENGINE: Final = 0.7
"""Coverage of every engine's held-out pairs."""
OTHER_ENGINE: Final = 0.375
OWN_PAIR: Final = 6.0
"""Both weights were chosen on the published rows that the bands are made from."""
STEP: Final = 0.01
LEVELS: Final = tuple(round(STATED + STEP * number, 2) for number in range(20))
DIGITS: Final = 3
METRICS: Final = ("ttft", "tpot")

Levels = Mapping[str, float]
"""By engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement, predicted twice from the same kernels."""

    launch: PublishedLaunch
    seen: MeanLatency
    """With all that is known."""
    unseen: MeanLatency
    """As if no row of its model and engine had been looked at."""
    kernels: Kernels

    @property
    def mode(self) -> PublishedMode:
        """Of the launch."""
        return "disaggregated" if self.launch.is_disaggregated else "aggregated"

    @property
    def pair(self) -> str:
        """Network and engine."""
        return f"{self.launch.decoder.network}|{self.launch.engine}"

    @property
    def setting(self) -> str:
        """What two layouts share that differ in nothing else, but for lengths and concurrency."""
        one = self.launch
        return "|".join((self.pair, *(one.system, one.release, one.harness, repr(one.formats))))

    def log(self, metric: str, *, is_new: bool) -> float:
        """Logarithm of measured over predicted seconds."""
        predicted = self.unseen if is_new else self.seen
        return math.log(getattr(self.launch, f"{metric}_s") / getattr(predicted, f"{metric}_s"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Regime:
    """Rows of one mode whose kernels come from one kind of source."""

    mode: PublishedMode
    kernels: Kernels
    rows: tuple[Row, ...]
    pair_C: npt.NDArray[np.str_]
    engine_C: npt.NDArray[np.str_]
    setting_C: npt.NDArray[np.str_]
    new_C: Mapping[str, Floats]
    """By metric: residuals of unseen predictions."""
    known_C: Mapping[str, Floats]
    """The same of seen ones."""

    @property
    def pairs(self) -> tuple[str, ...]:
        """In order."""
        return tuple(sorted(set(self.pair_C.tolist())))

    def edges(
        self,
        metric: str,
        *,
        engine: str,
        level: float,
        used_C: Flags,
        own: str = "",
    ) -> tuple[float, float]:
        """Return the logarithms of a band.

        Args:
            metric: `ttft` or `tpot`.
            engine: whose band.
            level: share of the weight inside.
            used_C: rows that it is made from.
            own: the pair, where it is known.
        """
        weight_C = self._weights(used_C) * np.where(self.engine_C == engine, 1.0, OTHER_ENGINE)
        weight_C[self.pair_C == own] *= OWN_PAIR
        residual_C = self.known_C[metric] if own else self.new_C[metric]
        value_C, weight_C = residual_C[used_C], weight_C[used_C]
        if metric == "tpot":
            size = quantile(np.abs(value_C), weight_C, level)
            return -size, size
        outer = 0.5 * (1.0 + level)
        return -quantile(-value_C, weight_C, outer), quantile(value_C, weight_C, outer)

    def _weights(self, used_C: Flags) -> Floats:
        """Weights: every pair has total weight one."""
        _, group_C = np.unique(self.pair_C, return_inverse=True)
        counts = np.bincount(group_C[used_C], minlength=group_C.max() + 1)
        return np.asarray(np.where(used_C, 1.0 / np.maximum(counts[group_C], 1), 0.0))

    def left_out(self, metric: str, levels: Levels, *, by: str = "pair") -> tuple[Floats, Floats]:
        """Return for every row the band that was made without its pair, or without its setting.

        Without its setting the pair is known from its other settings; rows of a pair with one
        setting get NaN.
        """
        low_C, high_C = (np.full(len(self.rows), np.nan) for _ in range(2))
        key_C = self.pair_C if by == "pair" else self.setting_C
        for key in np.unique(key_C):
            own_C, used_C = key_C == key, key_C != key
            first = int(np.argmax(own_C))
            pair = self.pair_C[first]
            is_known = ((self.pair_C == pair) & used_C).any()
            if not used_C.any() or (by != "pair" and not is_known):
                continue
            low_C[own_C], high_C[own_C] = self.edges(
                metric,
                engine=self.engine_C[first],
                level=levels[str(self.engine_C[first])],
                used_C=used_C,
                own="" if by == "pair" else pair,
            )
        return np.minimum(low_C, 0.0), np.maximum(high_C, 0.0)

    def inside(self, metric: str, levels: Levels) -> Flags:
        """Return whether each row is inside the band without its pair."""
        low_C, high_C = self.left_out(metric, levels)
        residual_C = self.new_C[metric]
        return np.asarray((low_C <= residual_C) & (residual_C <= high_C))

    def by_pair(self, value_C: npt.NDArray[np.generic]) -> float:
        """Return the mean, with equal weight for every pair."""
        own = [np.mean(value_C[self.pair_C == pair].astype(np.float64)) for pair in self.pairs]
        return float(np.mean(own))

    def by_engine(self, value_C: npt.NDArray[np.generic]) -> dict[str, float]:
        """Return the same mean over the pairs of each engine."""
        return {
            str(engine): float(
                np.mean(
                    [
                        np.mean(value_C[self.pair_C == pair].astype(np.float64))
                        for pair in np.unique(self.pair_C[self.engine_C == engine])
                    ]
                )
            )
            for engine in np.unique(self.engine_C)
        }

    def levels(self, metric: str) -> Levels:
        """Return by engine the least level that holds what is stated of pairs left out."""
        engines = get_args(EngineName)
        result = [self.inside(metric, dict.fromkeys(engines, level)) for level in LEVELS]
        held = [self.by_pair(inside_C) >= STATED for inside_C in result]
        first = held.index(True) if any(held) else len(LEVELS) - 1
        levels = dict.fromkeys(engines, LEVELS[first])
        for level, inside_C in zip(LEVELS[first:], result[first:], strict=True):
            for engine, share in self.by_engine(inside_C).items():
                if share < LEAST_OF_ENGINE:
                    levels[engine] = min(LEVELS[-1], round(level + STEP, 2))
        return levels


def quantile(value_C: Floats, weight_C: Floats, share: float) -> float:
    """Return the least value that this share of the weight does not pass."""
    order_C = np.argsort(value_C, kind="stable")
    passed_C = np.cumsum(weight_C[order_C])
    place = int(np.searchsorted(passed_C, share * passed_C[-1] * (1.0 - 1e-12)))
    return float(value_C[order_C[min(place, len(order_C) - 1)]])


def regimes_of(rows: Sequence[Row]) -> tuple[Regime, ...]:
    """Group rows by mode and source of kernels."""
    kinds = sorted({(row.mode, row.kernels) for row in rows})
    return tuple(
        _regime([row for row in rows if (row.mode, row.kernels) == kind]) for kind in kinds
    )


def _regime(rows: Sequence[Row]) -> Regime:
    def logs(metric: str, *, is_new: bool) -> Floats:
        return np.array([row.log(metric, is_new=is_new) for row in rows])

    return Regime(
        mode=rows[0].mode,
        kernels=rows[0].kernels,
        rows=tuple(rows),
        pair_C=np.array([row.pair for row in rows]),
        engine_C=np.array([row.launch.engine for row in rows]),
        setting_C=np.array([row.setting for row in rows]),
        new_C={metric: logs(metric, is_new=True) for metric in METRICS},
        known_C={metric: logs(metric, is_new=False) for metric in METRICS},
    )


def stored_bands(regime: Regime) -> tuple[tuple[StoredBand, ...], Coverage]:
    """Return the bands of a regime: every engine's, and those of its own pairs."""
    levels = {metric: regime.levels(metric) for metric in METRICS}
    result = []
    for engine in get_args(EngineName):
        is_own_C = regime.engine_C == engine
        for network in ("", *sorted({pair.split("|")[0] for pair in regime.pair_C[is_own_C]})):
            own = f"{network}|{engine}" if network else ""
            counted_C = is_own_C & (regime.pair_C == own) if own else is_own_C
            ttft, tpot = (
                _stored(regime, metric, engine, level=levels[metric][engine], own=own)
                for metric in METRICS
            )
            band = StoredBand(
                mode=regime.mode,
                kernels=regime.kernels,
                engine=engine,
                network=network,
                ttft=ttft,
                tpot=tpot,
                rows=int(counted_C.sum()),
                generations=tuple(
                    sorted({regime.rows[at].launch.generation for at in np.flatnonzero(counted_C)})
                ),
            )
            result.append(band)
    held = Coverage(
        mode=regime.mode,
        kernels=regime.kernels,
        pairs=len(regime.pairs),
        **{
            metric: round(regime.by_pair(regime.inside(metric, levels[metric])), DIGITS)
            for metric in METRICS
        },
    )
    return tuple(result), held


def _stored(regime: Regime, metric: str, engine: str, *, level: float, own: str) -> Edges:
    low, high = regime.edges(
        metric,
        engine=engine,
        level=level,
        used_C=np.ones(len(regime.rows), dtype=np.bool_),
        own=own,
    )
    return round(math.exp(low), DIGITS), round(math.exp(high), DIGITS)


def widenings(regimes: Sequence[Regime]) -> tuple[Widening, ...]:
    """Return what bands lack without any row of a release, a generation or a mode."""
    result = []
    for kernels in sorted({regime.kernels for regime in regimes}):
        own = [regime for regime in regimes if regime.kernels == kernels]
        levels: dict[tuple[str, str], Levels] = {
            (one.mode, name): one.levels(name) for one in own for name in METRICS
        }
        for lacking in get_args(Lacking):
            costs = {metric: _costs(own, lacking, metric, levels) for metric in METRICS}
            if count := len(costs["tpot"]):
                rank = min(count, math.ceil(STATED * (count + 1)))
                factors = {
                    metric: round(math.exp(max(some[rank - 1], 0.0)), DIGITS)
                    for metric, some in costs.items()
                }
                result.append(Widening(lacking=lacking, kernels=kernels, groups=count, **factors))
    return tuple(result)


def _costs(
    regimes: Sequence[Regime],
    lacking: Lacking,
    metric: str,
    levels: Mapping[tuple[str, str], Levels],
) -> list[float]:
    """Return what each release, generation or mode costs that is left out, least first."""
    by_group: dict[str, list[Floats]] = {}
    for group, excess_C in _excesses(regimes, lacking, metric, levels):
        by_group.setdefault(group, []).append(excess_C)
    return sorted(_four_of_five(some) for some in by_group.values())


def _four_of_five(pairs: Sequence[Floats]) -> float:
    weight_C = np.concatenate([np.full(len(one), 1.0 / len(one)) for one in pairs])
    return quantile(np.concatenate(pairs), weight_C, STATED)


def _excesses(
    regimes: Sequence[Regime],
    lacking: Lacking,
    metric: str,
    levels: Mapping[tuple[str, str], Levels],
) -> Iterator[tuple[str, Floats]]:
    """Yield per pair in what is left out how far its rows lie outside of the bands without it."""
    for one, other in itertools.product(regimes, repeat=2):
        if (lacking == "mode") is (one.mode == other.mode):
            continue
        key_C = np.array([_left_out_key(row, lacking) for row in one.rows])
        for key in np.unique(key_C):
            used_C = key_C != key if one is other else np.ones(len(other.rows), dtype=np.bool_)
            for pair in np.unique(one.pair_C[key_C == key]) if used_C.any() else ():
                own_C = (key_C == key) & (one.pair_C == pair)
                is_known = bool((used_C & (other.pair_C == pair)).any())
                engine = str(pair).rpartition("|")[2]
                low, high = other.edges(
                    metric,
                    engine=engine,
                    level=levels[other.mode, metric][engine],
                    used_C=used_C,
                    own=str(pair) if is_known else "",
                )
                value_C = (one.known_C if is_known else one.new_C)[metric][own_C]
                yield str(key), np.maximum(min(low, 0.0) - value_C, value_C - max(high, 0.0))


def _left_out_key(row: Row, lacking: Lacking) -> str:
    launch = row.launch
    if lacking == "mode":
        return row.mode
    if lacking == "generation":
        return launch.generation
    return f"{launch.engine} {launch.release}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ratios:
    """Sizes of errors of ratios."""

    pair_P: npt.NDArray[np.str_]
    setting_P: npt.NDArray[np.str_]
    error_P: Mapping[str, Floats]
    """By metric."""

    def size(self, metric: str, *, used_P: Flags) -> float:
        """Return what holds the stated share of ratios; pairs weigh the same, so do settings."""
        weight_P = np.zeros(len(self.pair_P))
        for pair in np.unique(self.pair_P[used_P]):
            settings = np.unique(self.setting_P[used_P & (self.pair_P == pair)])
            for setting in settings:
                own_P = used_P & (self.setting_P == setting)
                weight_P[own_P] = 1.0 / len(settings) / own_P.sum()
        return quantile(self.error_P[metric][used_P], weight_P[used_P], STATED)

    def covered(self, metric: str) -> float:
        """Return the share of ratios of a left-out pair inside, pairs weighing the same."""
        shares = []
        for pair in np.unique(self.pair_P):
            own_P = self.pair_P == pair
            shares.append(
                float(np.mean(self.error_P[metric][own_P] <= self.size(metric, used_P=~own_P)))
            )
        return float(np.mean(shares))


def ratios_of(
    rows: Sequence[Row], *, harnesses: Sequence[Harness] = (Harness.INFERENCEX,)
) -> Ratios:
    """Pair the layouts of every setting at equal lengths and concurrency."""
    by_case: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        one = row.launch
        if row.kernels == "tables" and row.mode == "aggregated" and one.harness in harnesses:
            case = (row.setting, one.input_tokens, one.output_tokens, one.concurrency)
            by_case.setdefault(case, []).append(row)
    both = [
        (one, other)
        for own in by_case.values()
        for one, other in itertools.combinations(own, 2)
        if one.launch.sides != other.launch.sides
    ]
    return Ratios(
        pair_P=np.array([one.pair for one, _ in both]),
        setting_P=np.array([one.setting for one, _ in both]),
        error_P={
            metric: np.array(
                [
                    abs(one.log(metric, is_new=True) - other.log(metric, is_new=True))
                    for one, other in both
                ]
            )
            for metric in METRICS
        },
    )


def ratio_band(ratios: Ratios) -> LatencyRatioBand:
    """Return the bands of ratios."""
    every_P = np.ones(len(ratios.pair_P), dtype=np.bool_)
    sizes = {metric: ratios.size(metric, used_P=every_P) for metric in METRICS}
    edges = {
        metric: (round(math.exp(-size), DIGITS), round(math.exp(size), DIGITS))
        for metric, size in sizes.items()
    }
    return LatencyRatioBand(
        ttft=edges["ttft"],
        tpot=edges["tpot"],
        ttft_covered=round(ratios.covered("ttft"), DIGITS),
        tpot_covered=round(ratios.covered("tpot"), DIGITS),
        pairs=len(np.unique(ratios.pair_P)),
        ratios=len(ratios.pair_P),
    )


def interval_score(low_C: Floats, high_C: Floats, value_C: Floats) -> Floats:
    """Return width plus what lies outside, in logarithms; the least is best.

    Source:  Gneiting and Raftery, JASA 102, 2007: (u - l) + 2 / alpha (distance outside).
    """
    outside_C = np.maximum(low_C - value_C, 0.0) + np.maximum(value_C - high_C, 0.0)
    return np.asarray(high_C - low_C + 2.0 / (1.0 - STATED) * outside_C)
