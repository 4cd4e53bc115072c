"""Published launches predicted twice: with all that is known, and as if their pair were new."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.benchmarks.serving_band_fit import Row
from tuner.backtest.serving.backtest import PredictedLaunches
from tuner.backtest.serving.launches import SYSTEMS, PublishedLaunch
from tuner.backtest.serving.prediction import Predictor
from tuner.backtest.serving.recipes import find_recipe
from tuner.backtest.serving.tables import build_machines
from tuner.costs.serve.machine import ServingMachine
from tuner.devices.catalogue import find_device

GENERATIONS: Final = ("hopper", "blackwell")
"""Of devices with published launches."""


def unseen_rows(predicted: PredictedLaunches, folders: Sequence[Path]) -> tuple[Row, ...]:
    """Return launches priced from kernels, and again as unseen pairs where that differs.

    Args:
        judged: as it was predicted.
        folders: where its kernels are from.
    """
    pairs = [pair for pair in predicted.pairs if pair.launch.generation in GENERATIONS]
    changed = {pair.launch.system for pair in pairs if _changes(pair.launch)}
    predictor = Predictor(machines=build_machines(sorted(changed), folders)[0], is_unseen=True)
    return tuple(
        Row(
            launch=pair.launch,
            seen=pair.latency,
            unseen=predictor.latency(pair.launch) if _changes(pair.launch) else pair.latency,
            kernels="tables",
        )
        for pair in pairs
    )


def datasheet_rows(predicted: PredictedLaunches) -> Iterator[Row]:
    """Yield the same launches priced from datasheets only."""
    launches = [pair.launch for pair in predicted.pairs if pair.launch.generation in GENERATIONS]
    for system in sorted({launch.system for launch in launches}):
        machine = ServingMachine(sheet=find_device(SYSTEMS[system]), tables=None)
        seen = Predictor(machines={system: machine})
        unseen = replace(seen, is_unseen=True)
        for launch in launches:
            if launch.system == system:
                latency = seen.latency(launch)
                other = unseen.latency(launch) if _changes(launch) else latency
                yield Row(launch=launch, seen=latency, unseen=other, kernels="datasheet")


def _changes(launch: PublishedLaunch) -> bool:
    return find_recipe(launch) != find_recipe(launch, is_unseen=True)
