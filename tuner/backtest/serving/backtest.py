"""From a table of measured serving runs to errors of TTFT and TPOT.

Rows are read as launches (launches.py), those that repeat a measurement are set aside, the rest are
predicted (prediction.py) and scored (scoring.py). A measurement that one row states without what is
needed and another with it counts as the latter.
"""

from collections.abc import Sequence
from pathlib import Path

from tuner.backtest.serving.launches import Cells, Launch, MissingError, launch_of
from tuner.backtest.serving.prediction import Latency, Predictor
from tuner.backtest.serving.records import JudgedLaunch, ServingBacktest
from tuner.backtest.serving.scoring import Pair, metric_of, tpot, ttft
from tuner.backtest.serving.tables import machines_of

UNCALIBRATED = "uncalibrated"


def backtest_serving(rows: Sequence[Cells], *, profiles: Sequence[Path] = ()) -> ServingBacktest:
    """Predict every distinct measurement that can be read, and judge it."""
    read = [_read(cells, number) for number, cells in enumerate(rows, start=1)]
    systems = sorted({launch.system for launch in read if isinstance(launch, Launch)})
    machines, origins = machines_of(systems, profiles)
    predictor = Predictor(machines=machines)
    first = _first_of(rows, read)
    judged, pairs, refused = [], [], []
    for number, (cells, launch) in enumerate(zip(rows, read, strict=True)):
        chosen = first[_measured(cells)]
        if chosen != number:
            judged.append(_judged(cells, launch, number=number, copy_of=_id(rows[chosen], chosen)))
        elif isinstance(launch, Launch):
            latency = predictor.latency(launch)
            pairs.append(Pair(launch=launch, latency=latency))
            judged.append(_judged(cells, launch, number=number, latency=latency))
        else:
            refused.append(_source(cells))
            judged.append(_judged(cells, launch, number=number))
    return ServingBacktest(
        tables=origins,
        residuals=UNCALIBRATED,
        table_rows=len(rows),
        copies=sum(row.copy_of is not None for row in judged),
        ttft=metric_of(pairs, read=ttft, refused=refused),
        tpot=metric_of(pairs, read=tpot, refused=refused),
        rows=tuple(judged),
    )


def _read(cells: Cells, number: int) -> Launch | str:
    try:
        return launch_of(cells, number=number)
    except MissingError as error:
        return str(error)


def _measured(cells: Cells) -> tuple[str, str]:
    return cells.get("silicon_ttft_ms", "").strip(), cells.get("silicon_tpot_ms", "").strip()


def _first_of(rows: Sequence[Cells], read: Sequence[Launch | str]) -> dict[tuple[str, str], int]:
    """By measured pair: the first row that can be read, else the first."""
    first: dict[tuple[str, str], int] = {}
    for number, (cells, launch) in enumerate(zip(rows, read, strict=True)):
        key = _measured(cells)
        if not all(key):
            key = (f"row {number}", "")
        known = first.setdefault(key, number)
        if isinstance(read[known], str) and isinstance(launch, Launch):
            first[key] = number
    for number, cells in enumerate(rows):
        first.setdefault(_measured(cells), number)
    return first


def _id(cells: Cells, number: int) -> str:
    return cells.get("id", "") or f"row-{number + 1}"


def _source(cells: Cells) -> str:
    return "|".join(cells.get(name, "")[:40] for name in ("system", "backend", "mode"))


def _judged(
    cells: Cells,
    launch: Launch | str,
    *,
    number: int,
    latency: Latency | None = None,
    copy_of: str | None = None,
) -> JudgedLaunch:
    is_read = isinstance(launch, Launch)
    return JudgedLaunch(
        id=_id(cells, number),
        source=launch.source if isinstance(launch, Launch) else _source(cells),
        reason=None if is_read else str(launch),
        copy_of=copy_of,
        predicted_ttft_s=latency.ttft_s if latency else None,
        measured_ttft_s=launch.ttft_s if isinstance(launch, Launch) else None,
        predicted_tpot_s=latency.tpot_s if latency else None,
        measured_tpot_s=launch.tpot_s if isinstance(launch, Launch) else None,
        estimated=latency.estimated if latency else (),
    )
