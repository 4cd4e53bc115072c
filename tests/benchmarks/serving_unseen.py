"""Published launches predicted twice: with all that is known, and as if their pair were new."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.benchmarks.published_serving import as_unseen
from tests.benchmarks.serving_band_fit import Row
from tuner.backtest.serving.backtest import PredictedLaunches
from tuner.backtest.serving.launches import SYSTEMS
from tuner.backtest.serving.prediction import Predictor
from tuner.backtest.serving.tables import build_machines
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import ServingMachine

GENERATIONS: Final = ("hopper", "blackwell")
"""Of devices with published launches."""


def unseen_rows(predicted: PredictedLaunches, folders: Sequence[Path]) -> tuple[Row, ...]:
    """Return launches priced from kernels, and again as unseen pairs where that differs.

    Args:
        judged: as it was predicted.
        folders: where its kernels are from.
    """
    pairs = [pair for pair in predicted.pairs if pair.launch.generation in GENERATIONS]
    changed = {pair.launch.system for pair in pairs if as_unseen(pair.launch) != pair.launch}
    predictor = Predictor(machines=build_machines(sorted(changed), folders)[0])
    return tuple(
        Row(
            launch=pair.launch,
            seen=pair.latency,
            unseen=pair.latency
            if as_unseen(pair.launch) == pair.launch
            else predictor.latency(as_unseen(pair.launch)),
            kernels="tables",
        )
        for pair in pairs
    )


def datasheet_rows(predicted: PredictedLaunches) -> Iterator[Row]:
    """Yield the same launches priced from datasheets only."""
    launches = [pair.launch for pair in predicted.pairs if pair.launch.generation in GENERATIONS]
    for system in sorted({launch.system for launch in launches}):
        machine = ServingMachine(
            engines=ENGINE_TRAITS, sheet=find_device(SYSTEMS[system]), tables=None
        )
        predictor = Predictor(machines={system: machine})
        for launch in launches:
            if launch.system == system:
                latency, other = predictor.latency(launch), as_unseen(launch)
                unseen = latency if other == launch else predictor.latency(other)
                yield Row(launch=launch, seen=latency, unseen=unseen, kernels="datasheet")
