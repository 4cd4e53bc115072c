"""Measurements of a placement: `verified.json` where the goal is to place experts."""

from typing import Literal

from profilers.records import Record, Seconds
from tuner.tables import Rows


class PlaceTrial(Record, extra="ignore"):
    """Expert GEMMs of the most-loaded ranks under one placement; further fields are ignored."""

    decision: str
    """`plan`, or the name of the alternative."""
    predicted_layer_time_s: Seconds | None
    """GEMMs of the most-loaded rank, mean over layers; absent if no model and device were named."""
    measured_layer_time_s: Seconds | None
    """Seconds of the slowest rank, median of repeats, mean over measured layers."""


class PlaceVerified(Record):
    """`verified.json` of a placement."""

    schema_version: Literal[1] = 1
    # 1: first release.
    device: str
    """Device on which every rank was run in turn."""
    layers: tuple[int, ...]
    """Measured decoder layers."""
    trials: Rows[PlaceTrial]
    winner: str | None
    regret_ratio: float | None
    """Regret of the plan: its measured time over that of the best trial, minus 1."""
    notes: tuple[str, ...] = ()
