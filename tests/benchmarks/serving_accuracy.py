"""Errors of predicted TTFT and TPOT on published runs, beside their aims.

    python tests/benchmarks/serving_accuracy.py RUNS.csv [TABLES]

Reads a published table (published_serving.py), and kernels from TABLES (profiles or a folder of
aiconfigurator's tables), else from datasheets. Prints first the accuracy for a new
pair (model, engine): every pair is held out in turn, predicted without what only its rows have
shown, and compared with bands made without it. Then errors of the model as it ships, with residuals
of other models only, and after one and three launches of the same model, system and engine, as
plans are corrected by them (tuner/costs/serve/residual.py), beside the share of rows that the bands
of these corrections hold; last the order of strategies. Figures that miss their aim are marked.
Exit code 1: a figure misses.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.benchmarks.bars import is_missed, say
from tests.benchmarks.published_serving import Harness, read_published
from tests.benchmarks.serving_band_fit import METRICS, Regime, Row, interval_score, regimes_of
from tests.benchmarks.serving_unseen import unseen_rows
from tuner.backtest.cells import Cells, MissingError
from tuner.backtest.records import Errors
from tuner.backtest.serving.backtest import predict_pairs
from tuner.backtest.serving.launches import OddError, parse_launch
from tuner.backtest.serving.residuals import scale_latency
from tuner.backtest.serving.scores import Pair, summarise_metric, tpot, ttft
from tuner.calibrate.serving import held_out
from tuner.costs.serve.residual import USUAL_LOG_SPREADS, latency_residual

LEAST_PAIRS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """Largest allowed errors; None: no aim."""

    tpot_median: float | None = None
    tpot_p90: float | None = None
    tpot_bias: float | None = None
    ttft_median: float | None = None
    ttft_p90: float | None = None


def main(arguments: Sequence[str]) -> int:
    """Print every figure and return 1 if any misses its aim."""
    table = read_published(Path(arguments[0]))
    predicted = predict_pairs(table, profiles=[Path(a) for a in arguments[1:]])
    pairs = [pair for pair in predicted.pairs if not pair.launch.is_disaggregated]
    hopper = [pair for pair in pairs if pair.launch.generation == "hopper"]
    blackwell = [pair for pair in pairs if pair.launch.generation == "blackwell"]
    aim = Aim(tpot_median=0.11, tpot_p90=0.30, tpot_bias=0.08, ttft_median=0.31)
    recipe = Aim(tpot_median=0.08, ttft_median=0.16, ttft_p90=0.60)
    rows = unseen_rows(predicted, [Path(a) for a in arguments[1:]])
    missed = [*_leave_pairs_out([row for row in rows if row.mode == "aggregated"])]
    missed += _judge("hopper, uncalibrated", hopper, aim)
    missed += _judge("hopper, InferenceX, uncalibrated", _recipes(hopper), recipe)
    missed += _judge("hopper, other driver, uncalibrated", _others(hopper), Aim())
    missed += _judge("blackwell, uncalibrated", blackwell, Aim(tpot_median=0.11, ttft_median=0.28))
    plain = _errors(hopper)[0].median_ape or 0.0
    old = [pair for pair in held_out(pairs) if pair.launch.generation == "hopper"]
    worst = min(0.10, plain + 0.01)
    missed += _judge(
        "hopper, other models' residuals", old, Aim(tpot_median=worst, ttft_median=0.26)
    )
    missed += _judge(
        "hopper, InferenceX, other models' residuals", _recipes(old), Aim(ttft_median=0.19)
    )
    one = after_launches(hopper, launches=1, draws=5, seed=0)
    missed += _judge("hopper, after 1 launch", one.pairs, Aim())
    after = after_launches(hopper, launches=3, draws=5, seed=0)
    three = Aim(tpot_median=0.065, ttft_median=0.17)
    missed += _judge("hopper, after 3 launches", after.pairs, three)
    recipes = _recipes(after.pairs)
    missed += _judge("hopper, InferenceX, after 3 launches", recipes, Aim(ttft_median=0.13))
    for name, corrected in (("1 launch", one), ("3 launches", after)):
        for metric, share in corrected.held.items():
            missed.append(is_missed(f"  {metric.upper()} in its band after {name}", share, None))
    missed += _order(pairs)
    eligible_ratio = len(predicted.pairs) / max(sum(map(_is_eligible, table)), 1)
    missed.append(is_missed("eligible rows predicted", eligible_ratio, 0.98, is_most=False))
    for name in sorted({pair.launch.source for pair in predicted.pairs}):
        _judge(name, [pair for pair in predicted.pairs if pair.launch.source == name], Aim())
    return int(any(missed))


def _is_eligible(cells: Cells) -> bool:
    """Return whether a row's columns are all known, whether an engine runs them or not."""
    try:
        return bool(parse_launch(cells, number=0))
    except MissingError as error:
        return isinstance(error, OddError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """Rows as some launches of their model, system and engine correct them."""

    pairs: list[Pair]
    held: dict[str, float]
    """Share of corrected rows whose latency the correction's band holds, by metric."""


def after_launches(pairs: Sequence[Pair], *, launches: int, draws: int, seed: int) -> Corrected:
    """Predict every row after some other launches of its model, system and engine, sampled.

    Rows with fewer others than launches are left out; launches that say nothing correct nothing.
    """
    rng = np.random.default_rng(seed)
    groups: dict[tuple[str, ...], list[Pair]] = {}
    for pair in pairs:
        launch = pair.launch
        groups.setdefault((launch.decoder.name, launch.system, launch.engine), []).append(pair)
    corrected = []
    held: dict[str, list[bool]] = {metric: [] for metric in USUAL_LOG_SPREADS}
    for own in groups.values():
        if len(own) <= launches:
            continue
        ratio_N2 = np.exp([_residual_logs(pair) for pair in own])
        for number, pair in enumerate(own):
            others = np.delete(np.arange(len(own)), number)
            for _ in range(draws):
                drawn = rng.choice(others, launches, replace=False)
                factors = {}
                for column, metric in enumerate(USUAL_LOG_SPREADS):
                    ratios = ratio_N2[drawn, column].tolist()
                    fit = latency_residual(ratios, metric=metric, before=None)
                    factors[metric] = 1.0 if fit is None else fit.factor
                    if fit is not None:
                        low, high = fit.band.around(fit.factor)
                        held[metric].append(bool(low <= ratio_N2[number, column] <= high))
                latency = scale_latency(pair.latency, **factors)
                corrected.append(Pair(launch=pair.launch, latency=latency))
    return Corrected(
        pairs=corrected,
        held={metric: float(np.mean(seen)) for metric, seen in held.items() if seen},
    )


def _residual_logs(pair: Pair) -> tuple[float, float]:
    """Logarithms of measured over predicted seconds, in the order of `USUAL_LOG_SPREADS`."""
    (predicted_tpot, measured_tpot), (predicted_ttft, measured_ttft) = tpot(pair), ttft(pair)
    return (
        float(np.log(measured_ttft / predicted_ttft)),
        float(np.log(measured_tpot / predicted_tpot)),
    )


def _leave_pairs_out(rows: Sequence[Row]) -> list[bool]:
    """Print the accuracy for every pair (model, engine) when it is held out."""
    if len({row.pair for row in rows}) < LEAST_PAIRS:
        say("pairs left out: too few to leave any out")
        return []
    (regime,) = regimes_of(rows)
    say(f"pairs of model and engine left out: {len(regime.pairs)}, of {len(rows)} rows")
    missed = []
    for metric, aims in (("tpot", (0.10, 0.30)), ("ttft", (0.22, 0.65))):
        error_C = np.abs(np.exp(-regime.new_C[metric]) - 1.0)
        name = f"  {metric.upper()}"
        missed.append(is_missed(f"{name} median", float(np.median(error_C)), aims[0]))
        missed.append(is_missed(f"{name} P90", float(np.quantile(error_C, 0.9)), aims[1]))
        medians = [float(np.median(error_C[regime.pair_C == pair])) for pair in regime.pairs]
        is_missed(f"{name} median of a pair, mean over pairs", float(np.mean(medians)), None)
    for metric in METRICS:
        missed += _bands(regime, metric)
    return missed


def _bands(regime: Regime, metric: str) -> list[bool]:
    """Print coverage of held-out rows, scores and widths of the bands."""
    low_C, high_C = regime.left_out(metric, regime.levels(metric))
    residual_C = regime.new_C[metric]
    inside_C = (low_C <= residual_C) & (residual_C <= high_C)
    name = f"  {metric.upper()} bands stated as 80 %"
    missed = [
        is_missed(f"{name} hold, by row", float(np.mean(inside_C)), 0.78, is_most=False),
        is_missed(f"{name} hold, by pair", regime.by_pair(inside_C), 0.78, is_most=False),
    ]
    for engine, share in regime.by_engine(inside_C).items():
        own = float(np.mean(inside_C[regime.engine_C == engine]))
        missed.append(is_missed(f"{name} hold, {engine}, by row", own, 0.70, is_most=False))
        missed.append(is_missed(f"{name} hold, {engine}, by pair", share, 0.70, is_most=False))
    known_C = regime.known_C[metric]
    own_low_C, own_high_C = regime.left_out(metric, regime.levels(metric), by="setting")
    is_own_C = np.isfinite(own_low_C)
    if is_own_C.any():
        own_C = ((own_low_C <= known_C) & (known_C <= own_high_C))[is_own_C]
        name = f"{name} hold, known pairs by other systems, releases or formats"
        missed.append(is_missed(name, float(np.mean(own_C)), 0.78, is_most=False))
        say(f"    median width {np.median((own_high_C - own_low_C)[is_own_C]):.3f}")
    now_C = interval_score(low_C, high_C, residual_C)
    say(
        f"  {metric.upper()}, logarithms: interval score {np.mean(now_C):.3f} by row and"
        f" {regime.by_pair(now_C):.3f} by pair, median width {np.median(high_C - low_C):.3f}"
    )
    return missed


def _recipes(pairs: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in pairs if pair.launch.harness == Harness.INFERENCEX]


def _others(pairs: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in pairs if pair.launch.harness != Harness.INFERENCEX]


def _errors(pairs: Sequence[Pair]) -> tuple[Errors, Errors]:
    return summarise_metric(pairs, read=tpot, refused=()), summarise_metric(
        pairs, read=ttft, refused=()
    )


def _judge(name: str, pairs: Sequence[Pair], aim: Aim) -> list[bool]:
    if not pairs:
        say(f"{name}: nothing to measure")
        return []
    found_tpot, found_ttft = _errors(pairs)
    say(f"\n{name}: {len(pairs)} predictions")
    return [
        is_missed("  TPOT median", found_tpot.median_ape, aim.tpot_median),
        is_missed("  TPOT P90", found_tpot.p90_ape, aim.tpot_p90),
        is_missed("  TPOT bias", abs(found_tpot.bias or 0.0), aim.tpot_bias),
        is_missed("  TTFT median", found_ttft.median_ape, aim.ttft_median),
        is_missed("  TTFT P90", found_ttft.p90_ape, aim.ttft_p90),
        is_missed("  TTFT bias", abs(found_ttft.bias or 0.0), None),
    ]


def _order(pairs: Sequence[Pair]) -> list[bool]:
    missed = []
    say("\nstrategies at equal load, measured over 10 % apart")
    for name, read, aims in (
        ("TPOT", tpot, {"hopper": 0.97}),
        ("TTFT", ttft, {}),
    ):
        for generation, order in summarise_metric(pairs, read=read, refused=()).order.items():
            title = f"  {name}, {generation}, {order.pairs} pairs ordered right"
            aim = aims.get(generation)
            missed.append(is_missed(title, order.ordered_ratio, aim, is_most=False))
            title = f"  {name}, {generation}, {order.equal_pairs} of equally many devices"
            is_missed(title, order.equal_ordered_ratio, None)
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
