"""Measurements of a placement: `verified.json` where the goal is to place experts."""

from typing import Literal

from profilers.records import Record, Seconds
from tuner.tables import Rows

SCHEMA_VERSION = 1
# 1: first release.


class PlaceTrial(Record):
    """Expert GEMMs of the most-loaded ranks under one placement."""

    decision: str
    """`plan`, or the name of the alternative."""
    status: Literal["ok", "crashed"]
    reason: str = ""
    predicted_layer_time_s: Seconds | None
    """GEMMs of the most-loaded rank, mean over layers; absent if no model and device were named."""
    recalibrated_layer_time_s: Seconds | None
    """Predicted seconds times the median ratio of the other trials."""
    measured_layer_time_s: Seconds | None
    measured_layers_s: tuple[Seconds, ...] = ()
    """Seconds of each measured layer: its slowest rank, median of repeats."""


class PlaceVerified(Record):
    """`verified.json` of a placement."""

    schema_version: Literal[1] = 1
    device: str
    """Device on which every rank was run in turn."""
    layers: tuple[int, ...]
    """Measured decoder layers."""
    trials: Rows[PlaceTrial]
    winner: str | None
    regret_ratio: float | None
    """Regret of the plan: its measured time over that of the best trial, minus 1."""
    notes: tuple[str, ...] = ()
