"""Deciles of measured over predicted latency: what tuner/costs/serving/bands.py holds.

    python tests/benchmarks/serving_bands.py RUNS.csv [TABLES]

Reads a table in the layout of `moetune backtest` and predicts every launch on Hopper and Blackwell
that states what is needed: once from kernels (TABLES or the installed aiconfigurator-core) and once
with every table left out, from the datasheet alone. Prints the first, fifth and last decile of
measured over predicted TTFT and TPOT: by engine, of aggregated and of disaggregated launches.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tuner.backtest.serving.backtest import pairs_of
from tuner.backtest.serving.launches import SYSTEMS, Launch
from tuner.backtest.serving.prediction import Latency, Predictor
from tuner.backtest.serving.rows import read_cells
from tuner.costs.serving.machine import ServingMachine
from tuner.devices.catalogue import find_device

DECILES = (0.1, 0.5, 0.9)
GENERATIONS = ("hopper", "blackwell")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One launch with a prediction of it."""

    launch: Launch
    latency: Latency
    kernels: str


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main(arguments: Sequence[str]) -> int:
    """Print the deciles."""
    judged = pairs_of(read_cells(Path(arguments[0])), profiles=[Path(a) for a in arguments[1:]])
    launches = [pair.launch for pair in judged.pairs if pair.launch.generation in GENERATIONS]
    cases = [
        Case(launch=pair.launch, latency=pair.latency, kernels="tables")
        for pair in judged.pairs
        if pair.launch.generation in GENERATIONS
    ]
    cases += _without_tables(launches)
    for kernels in ("tables", "datasheet"):
        for is_disaggregated in (False, True):
            own = [
                case
                for case in cases
                if case.kernels == kernels and case.launch.is_disaggregated is is_disaggregated
            ]
            mode = "disaggregated" if is_disaggregated else "aggregated"
            for engine in sorted({case.launch.engine for case in own}):
                _print(
                    f"{kernels} {mode} {engine.value}",
                    [case for case in own if case.launch.engine is engine],
                )
            _print(f"{kernels} {mode} all", own)
    return 0


def _without_tables(launches: Sequence[Launch]) -> Iterator[Case]:
    for system in sorted({launch.system for launch in launches}):
        machine = ServingMachine(sheet=find_device(SYSTEMS[system]), tables=None)
        predictor = Predictor(machines={system: machine})
        for launch in launches:
            if launch.system == system:
                yield Case(launch=launch, latency=predictor.latency(launch), kernels="datasheet")


def _print(title: str, cases: Sequence[Case]) -> None:
    for name in ("ttft", "tpot"):
        ratios = np.array(
            [
                measured_s / predicted_s
                for case in cases
                if (measured_s := getattr(case.launch, f"{name}_s"))
                and (predicted_s := getattr(case.latency, f"{name}_s")) > 0.0
            ]
        )
        if len(ratios):
            low, middle, high = np.quantile(ratios, DECILES)
            _say(f"{title}: {name} {low:.2f} {middle:.2f} {high:.2f} of {len(ratios)} launches")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
