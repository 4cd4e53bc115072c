"""Errors of predicted TTFT and TPOT over a table of measured serving runs.

Rows are read as launches (launches.py), predicted (prediction.py) and scored (scores.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.backtest.cells import Cells, MissingError
from tuner.backtest.serving.launches import PublishedLaunch, parse_launch
from tuner.backtest.serving.prediction import MeanLatency, Predictor
from tuner.backtest.serving.records import ServingBacktest, ServingBacktestRow
from tuner.backtest.serving.residuals import apply_residuals, read_serving_residuals
from tuner.backtest.serving.scores import Pair, summarise_metric, tpot, ttft
from tuner.backtest.serving.tables import build_machines
from tuner.costs.serve.bands import bands_of

UNCALIBRATED = "uncalibrated"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedLaunches:
    """Every measurement that was predicted, and the result of every row."""

    pairs: tuple[Pair, ...]
    refused: tuple[str, ...]
    """Source of every measurement that cannot be read."""
    tables: dict[str, str]
    residuals: str
    rows: tuple[ServingBacktestRow, ...]


def predict_pairs(rows: Sequence[Cells], *, profiles: Sequence[Path] = ()) -> PredictedLaunches:
    """Predict every measurement that can be read.

    Args:
        rows: of the table.
        profiles: stored profiles, folders of tables, and files of residuals that end in .json.
    """
    files = [path for path in profiles if path.suffix == ".json"]
    residuals = read_serving_residuals(files[-1]) if files else None
    read = [_read(cells, number) for number, cells in enumerate(rows, start=1)]
    launches = {n: launch for n, launch in enumerate(read) if isinstance(launch, PublishedLaunch)}
    folders = [path for path in profiles if path.suffix != ".json"]
    latencies, origins = _latencies(launches, folders)
    latencies = {
        number: apply_residuals(latency, launches[number], residuals)
        for number, latency in latencies.items()
    }
    return PredictedLaunches(
        pairs=tuple(Pair(launch=launch, latency=latencies[n]) for n, launch in launches.items()),
        refused=tuple(_source(rows[n]) for n in range(len(rows)) if n not in launches),
        tables=origins,
        residuals=residuals.origin if residuals else UNCALIBRATED,
        rows=tuple(
            _to_row(cells, launch, number=number, latency=latencies.get(number))
            for number, (cells, launch) in enumerate(zip(rows, read, strict=True))
        ),
    )


def _latencies(
    launches: Mapping[int, PublishedLaunch], folders: Sequence[Path]
) -> tuple[dict[int, MeanLatency], dict[str, str]]:
    """Predict system by system, so that only one system's tables are in memory."""
    latencies: dict[int, MeanLatency] = {}
    origins: dict[str, str] = {}
    for system in sorted({launch.system for launch in launches.values()}):
        machines, origin = build_machines([system], folders)
        origins |= origin
        predictor = Predictor(machines=machines)
        for number, launch in launches.items():
            if launch.system == system:
                latencies[number] = predictor.latency(launch)
    return latencies, origins


def backtest_serving(rows: Sequence[Cells], *, profiles: Sequence[Path] = ()) -> ServingBacktest:
    """Predict every measurement that can be read, and compute the errors."""
    predicted = predict_pairs(rows, profiles=profiles)
    return ServingBacktest(
        tables=predicted.tables,
        residuals=predicted.residuals,
        table_rows=len(rows),
        ttft=summarise_metric(predicted.pairs, read=ttft, refused=predicted.refused),
        tpot=summarise_metric(predicted.pairs, read=tpot, refused=predicted.refused),
        ttft_coverage_ratio=_inside(
            [(row.ttft_band, row.measured_ttft_s) for row in predicted.rows]
        ),
        tpot_coverage_ratio=_inside(
            [(row.tpot_band, row.measured_tpot_s) for row in predicted.rows]
        ),
        rows=predicted.rows,
    )


def _inside(rows: Sequence[tuple[tuple[float, float] | None, float | None]]) -> float | None:
    """Share of measurements inside their band."""
    inside = [
        band[0] <= measured_s <= band[1]
        for band, measured_s in rows
        if band is not None and measured_s is not None
    ]
    return sum(inside) / len(inside) if inside else None


def _read(cells: Cells, number: int) -> PublishedLaunch | MissingError:
    try:
        return parse_launch(cells, number=number)
    except MissingError as error:
        return error


def _id(cells: Cells, number: int) -> str:
    return cells.get("id", "") or f"row-{number + 1}"


def _source(cells: Cells) -> str:
    return "|".join(cells.get(name, "")[:40] for name in ("system", "backend", "mode"))


def _to_row(
    cells: Cells,
    launch: PublishedLaunch | MissingError,
    *,
    number: int,
    latency: MeanLatency | None,
) -> ServingBacktestRow:
    is_read = isinstance(launch, PublishedLaunch)
    ttft_band = tpot_band = None
    is_new = False
    if latency is not None and isinstance(launch, PublishedLaunch):
        around = bands_of(
            launch.engine,
            release=launch.release,
            generation=launch.generation,
            mode="disaggregated" if launch.is_disaggregated else "aggregated",
            has_kernels=not latency.estimated,
            decoder=launch.decoder,
        )
        is_new = around.is_new
        ttft_band = around.ttft.around(latency.ttft_s)
        tpot_band = around.tpot.around(latency.tpot_s)
    return ServingBacktestRow(
        id=_id(cells, number),
        source=launch.source if isinstance(launch, PublishedLaunch) else _source(cells),
        reason=None if is_read else str(launch),
        predicted_ttft_s=latency.ttft_s if latency else None,
        ttft_band=ttft_band,
        measured_ttft_s=launch.ttft_s if isinstance(launch, PublishedLaunch) else None,
        predicted_tpot_s=latency.tpot_s if latency else None,
        tpot_band=tpot_band,
        is_new_pair=is_new,
        measured_tpot_s=launch.tpot_s if isinstance(launch, PublishedLaunch) else None,
        estimated=latency.estimated if latency else (),
    )
