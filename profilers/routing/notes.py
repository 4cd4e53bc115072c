"""Warnings about a recording before planning from it.

    P passes   L recorded MoE layers   E experts

Skew of a layer is the load of its most-loaded expert over the mean load: 1 is balanced. A recording
with experts that were never seen, or with few tokens, is used all the same: the notes say so.
"""

from typing import Final

import numpy as np

from profilers.records import Record
from profilers.routing.recording import Counts, Floats, Recording

FEW_PER_EXPERT: Final = 100
"""Token copies of the mean expert below which a layer's shares are mostly chance: the spread of a
count n around its mean is about its root, 10 % at 100."""


class Skew(Record):
    """Load of the most-loaded expert over the mean."""

    median: float
    """Of the layers, over the whole recording."""
    worst: float
    """Of the layers, over the whole recording."""
    pass_median: float
    """Of all layers of all passes."""
    pass_p99: float
    """Of all layers of all passes."""


def skew(recording: Recording) -> Skew:
    """How far a recording is from balanced."""
    of_layer = _peak_over_mean(recording.count_LE)
    of_pass = _peak_over_mean(recording.count_PLE)
    return Skew(
        median=float(np.median(of_layer)),
        worst=float(of_layer.max()),
        pass_median=float(np.median(of_pass)),
        pass_p99=float(np.quantile(of_pass, 0.99)),
    )


def notes(recording: Recording) -> tuple[str, ...]:
    """One line for each thing that limits what a recording can say."""
    lines = []
    unseen = recording.count_LE == 0
    if unseen.any():
        layers = int(unseen.any(axis=1).sum())
        lines.append(
            f"{int(unseen.sum())} experts of {layers} layers were never seen; they count as idle"
        )
    mean = float(recording.count_LE.mean())
    if mean < FEW_PER_EXPERT:
        lines.append(f"{mean:.0f} token copies an expert are few; record more tokens")
    if recording.num_passes == 1:
        lines.append("totals only: nothing can be judged pass by pass")
    idle = int((~recording.count_PLE.any(axis=2)).sum())
    if idle:
        lines.append(
            f"{idle} of {recording.num_passes * recording.num_layers} layers of passes"
            " have no token"
        )
    return tuple(lines)


def _peak_over_mean(count_XE: Counts) -> Floats:
    """Of every row that has tokens."""
    rows = count_XE.reshape(-1, count_XE.shape[-1])
    rows = rows[rows.any(axis=1)]
    return np.asarray(rows.max(axis=1) / rows.mean(axis=1), dtype=np.float64)
