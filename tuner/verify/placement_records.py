"""What is measured of a placement: `verified.json` where the goal is to place experts."""

from typing import Literal

from profilers.records import Record, Seconds

SCHEMA_VERSION = 1
# 1: first release.


class PlaceTrial(Record):
    """Expert products of the busiest ranks under one placement."""

    decision: str
    """`plan`, or the name of the alternative."""
    status: Literal["ok", "crashed"]
    reason: str = ""
    predicted_layer_time_s: Seconds | None
    """Products of the busiest rank, mean over layers; absent where no model and device were
    named."""
    recalibrated_layer_time_s: Seconds | None
    """Scaled by what the other trials showed."""
    measured_layer_time_s: Seconds | None
    measured_layers_s: tuple[Seconds, ...] = ()
    """Of each measured layer: the slowest of its ranks, median of repeats."""


class PlaceVerified(Record):
    """`verified.json` of a placement."""

    schema_version: Literal[1] = 1
    device: str
    """That stood for every rank in turn."""
    layers: tuple[int, ...]
    """Measured decoder layers."""
    trials: tuple[PlaceTrial, ...]
    winner: str | None
    regret_ratio: float | None
    """Measured time of the plan over that of the best trial, minus 1."""
    notes: tuple[str, ...] = ()
